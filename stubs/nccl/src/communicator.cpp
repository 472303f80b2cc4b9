// SPDX-License-Identifier: Apache-2.0
#include "communicator.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "settings.h"
#include "unique_id.h"

ncclstub::PreMul ncclComm::premul(ncclRedOp_t op) {
  const std::lock_guard lock(ops_mutex_);
  return ops_.at(op);
}

bool ncclComm::has_op(ncclRedOp_t op) {
  const std::lock_guard lock(ops_mutex_);
  return ops_.contains(op);
}

ncclRedOp_t ncclComm::add_op(const ncclstub::PreMul &value) {
  const std::lock_guard lock(ops_mutex_);
  ops_.emplace(next_op_, value);
  return static_cast<ncclRedOp_t>(next_op_++);
}

bool ncclComm::remove_op(ncclRedOp_t op) {
  const std::lock_guard lock(ops_mutex_);
  return ops_.erase(op) == 1;
}

namespace ncclstub {
namespace {

std::mutex handles_mutex;

std::unordered_map<ncclComm_t, std::unique_ptr<ncclComm>> &handles() {
  // Never destroyed: a program may exit with communicators alive, and threads may still ask for their state.
  static auto *const map = new std::unordered_map<ncclComm_t, std::unique_ptr<ncclComm>>;
  return *map;
}

}  // namespace

ncclComm_t publish(std::unique_ptr<ncclComm> comm) {
  const std::lock_guard lock(handles_mutex);
  const ncclComm_t handle = comm.get();
  handles().emplace(handle, std::move(comm));
  return handle;
}

std::unique_ptr<ncclComm> take(ncclComm_t handle) {
  const std::lock_guard lock(handles_mutex);
  auto node = handles().extract(handle);
  return node ? std::move(node.mapped()) : nullptr;
}

bool is_live(ncclComm_t handle) {
  const std::lock_guard lock(handles_mutex);
  return handle != nullptr && handles().contains(handle);
}

ncclResult_t check_handle(ncclComm_t handle) {
  if (is_live(handle)) return ncclSuccess;
  return fail(ncclInvalidArgument,
              "%p is not a communicator of this library: pass one that was initialised and not destroyed",
              static_cast<void *>(handle));
}

ncclResult_t read_capture(CUstream stream, Capture *out) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
  const CUgraphNode *nodes = nullptr;
  // Edge data are asked for because the driver refuses the query where some edge has any; see set_frontier.
  const CUgraphEdgeData *edges = nullptr;
  size_t count = 0;
  NCCL_TRY(CU(cuStreamGetCaptureInfo, stream, &status, &id, &graph, &nodes, &edges, &count));
  *out = {};
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) return ncclSuccess;
  if (status == CU_STREAM_CAPTURE_STATUS_INVALIDATED) {
    return fail(ncclInvalidUsage, "the capture of stream %p is invalidated, not active: end it and capture again",
                static_cast<void *>(stream));
  }
  out->id = id;
  out->graph = graph;
  out->frontier.assign(nodes, nodes + count);
  return ncclSuccess;
}

ncclResult_t set_frontier(CUstream stream, std::vector<CUgraphNode> nodes) {
  // Full edges: a collective that waits for all of its predecessor is right whatever the pending edge said.
  return CU(cuStreamUpdateCaptureDependencies, stream, nodes.data(), static_cast<const CUgraphEdgeData *>(nullptr),
            nodes.size(), static_cast<unsigned>(CU_STREAM_SET_CAPTURE_DEPENDENCIES));
}

ncclResult_t parse_config(const ncclConfig_t *config, Config *out) {
  out->graph_mixing = settings().graph_mixing;
  if (config == nullptr) return ncclSuccess;
  if (config->magic != kConfigMagic) {
    return fail(ncclInvalidArgument, "the configuration has magic 0x%x, not 0x%x: use NCCL_CONFIG_INITIALIZER",
                config->magic, kConfigMagic);
  }
  ncclConfig_t known;
  known.graph_usage_mode = kUndefined;
  known.blocking = kUndefined;
  std::memcpy(&known, config, std::min(config->size, sizeof known));
  if (known.blocking != kUndefined && known.blocking != 0 && known.blocking != 1) {
    return fail(ncclInvalidArgument, "the configuration has blocking %d, not 0 or 1: correct it", known.blocking);
  }
  if (known.graph_usage_mode == kUndefined) return ncclSuccess;
  if (known.graph_usage_mode < 0 || known.graph_usage_mode > 2) {
    return fail(ncclInvalidArgument, "the configuration has graphUsageMode %d, not 0 to 2: correct it",
                known.graph_usage_mode);
  }
  out->graph_mixing = known.graph_usage_mode == 2;
  return ncclSuccess;
}

ncclResult_t make_unique_id(ncclUniqueId *out) {
  IdContent content;
  if (getrandom(content.token, sizeof content.token, 0) != static_cast<ssize_t>(sizeof content.token)) {
    return fail(ncclSystemError, "the system gave no random bytes for a unique id: try again");
  }
  *out = {};
  std::memcpy(out->internal, &content, sizeof content);
  return ncclSuccess;
}

}  // namespace ncclstub
