// SPDX-License-Identifier: Apache-2.0
//
// Making, asking and ending communicators.
#include <algorithm>

#include "api.h"
#include "communicator.h"
#include "group.h"
#include "settings.h"

namespace ncclstub::api {
namespace {

ncclResult_t check_output(const void *pointer, const char *what) {
  if (pointer != nullptr) return ncclSuccess;
  return fail(ncclInvalidArgument, "the address for the %s is NULL: pass one", what);
}

ncclResult_t check_place(int size, int rank) {
  if (size >= 1 && rank >= 0 && rank < size) return ncclSuccess;
  return fail(ncclInvalidArgument, "rank %d of %d ranks does not exist: pass a rank from 0 below the size", rank, size);
}

// The context and device are the caller's now, not those of whatever thread runs the job.
ncclResult_t init_in_context(ncclComm_t *comm, const Shape &shape, const ncclUniqueId &id) {
  *comm = nullptr;
  return enqueue_job([comm, shape, id] {
    const ContextScope scope(shape.context);
    NCCL_TRY(scope.result());
    std::unique_ptr<ncclComm> made;
    NCCL_TRY(make_communicator(shape, id, &made));
    *comm = publish(std::move(made));
    return ncclSuccess;
  });
}

ncclResult_t init_rank(ncclComm_t *comm, int size, const ncclUniqueId &id, int rank, const ncclConfig_t *config) {
  NCCL_TRY(check_settings());
  NCCL_TRY(check_output(comm, "communicator"));
  NCCL_TRY(check_place(size, rank));
  Shape shape{size, rank, 0, nullptr, {}};
  NCCL_TRY(parse_config(config, &shape.config));
  NCCL_TRY(current_context(&shape.context, &shape.device));
  return init_in_context(comm, shape, id);
}

// A child inherits its parent's configuration unless it has one of its own.
ncclResult_t child_config(ncclComm_t parent, const ncclConfig_t *config, Config *out) {
  *out = parent->config;
  return config == nullptr ? ncclSuccess : parse_config(config, out);
}

ncclResult_t end(ncclComm_t handle, bool abort) {
  std::unique_ptr<ncclComm> comm = take(handle);
  if (comm == nullptr) return check_handle(handle);
  const ContextScope scope(comm->context);
  if (abort) comm->stop();
  const ncclResult_t flushed = comm->flush();
  comm.reset();
  // An aborted communicator's kernels are expected to fail.
  return abort ? ncclSuccess : flushed;
}

}  // namespace

ncclResult_t ncclGetVersion(int *version) {
  NCCL_TRY(check_output(version, "version"));
  NCCL_TRY(check_settings());
  *version = settings().version;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  NCCL_TRY(check_output(id, "unique id"));
  return make_unique_id(id);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
  return group_failed(init_rank(comm, size, id, rank, nullptr));
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return group_failed(init_rank(comm, size, id, rank, config));
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int id_count, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  if (id_count < 1 || ids == nullptr) {
    return group_failed(fail(ncclInvalidArgument, "%d unique ids at %p cannot be used: pass at least one", id_count,
                             static_cast<void *>(ids)));
  }
  return group_failed(init_rank(comm, size, ids[0], rank, config));
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
  NCCL_TRY(check_settings());
  NCCL_TRY(check_output(comms, "communicators"));
  if (count < 1) return fail(ncclInvalidArgument, "%d communicators cannot be made: ask for at least 1", count);
  std::vector<Shape> shapes;
  for (int rank = 0; rank < count; ++rank) {
    Shape shape{count, rank, devices == nullptr ? rank : devices[rank], nullptr, {}};
    if (std::ranges::find(shapes, shape.device, &Shape::device) != shapes.end()) {
      return fail(ncclInvalidUsage, "device %d is listed twice, not once: list each device once", shape.device);
    }
    NCCL_TRY(parse_config(nullptr, &shape.config));
    NCCL_TRY(primary_context(shape.device, &shape.context));
    shapes.push_back(shape);
  }
  ncclUniqueId id;
  NCCL_TRY(make_unique_id(&id));
  NCCL_TRY(group_start());
  for (int rank = 0; rank < count; ++rank) group_failed(init_in_context(&comms[rank], shapes[rank], id));
  return group_end();
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config) {
  NCCL_TRY(group_failed(check_handle(comm)));
  NCCL_TRY(group_failed(check_output(child, "child communicator")));
  *child = nullptr;
  if (color < 0 && color != kNoColor) {
    return group_failed(
        fail(ncclInvalidArgument, "colour %d is neither %d (none) nor from 0: correct it", color, kNoColor));
  }
  Config child_settings;
  NCCL_TRY(group_failed(child_config(comm, config, &child_settings)));
  return enqueue_job([=] {
    NCCL_TRY(check_handle(comm));
    const ContextScope scope(comm->context);
    NCCL_TRY(scope.result());
    std::unique_ptr<ncclComm> made;
    NCCL_TRY(comm->split(color, key, child_settings, &made));
    if (made != nullptr) *child = publish(std::move(made));
    return ncclSuccess;
  });
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int excluded_count, ncclComm_t *child, ncclConfig_t *config,
                            int flags) {
  constexpr int kShrinkAbort = 1;
  NCCL_TRY(group_failed(check_handle(comm)));
  NCCL_TRY(group_failed(check_output(child, "child communicator")));
  *child = nullptr;
  if (excluded_count < 1 || excluded_count >= comm->size || excluded == nullptr) {
    return group_failed(fail(ncclInvalidArgument, "%d of %d ranks cannot be excluded: exclude at least 1 and leave 1",
                             excluded_count, comm->size));
  }
  std::vector<int> ranks(excluded, excluded + excluded_count);
  std::ranges::sort(ranks);
  const bool twice = std::ranges::adjacent_find(ranks) != ranks.end();
  if (twice || ranks.front() < 0 || ranks.back() >= comm->size || std::ranges::binary_search(ranks, comm->rank)) {
    return group_failed(fail(ncclInvalidArgument,
                             "the excluded ranks %d to %d are not distinct other ranks of %d: correct the list",
                             ranks.front(), ranks.back(), comm->size));
  }
  Config child_settings;
  NCCL_TRY(group_failed(child_config(comm, config, &child_settings)));
  if ((flags & kShrinkAbort) != 0) comm->stop();
  return enqueue_job([=] {
    NCCL_TRY(check_handle(comm));
    const ContextScope scope(comm->context);
    NCCL_TRY(scope.result());
    std::unique_ptr<ncclComm> made;
    NCCL_TRY(comm->shrink(ranks, child_settings, &made));
    *child = publish(std::move(made));
    return ncclSuccess;
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  NCCL_TRY(check_handle(comm));
  if (comm->revoked) return fail(ncclInvalidUsage, "the communicator is revoked, not active: destroy it");
  if (comm->finalized.exchange(true)) {
    return fail(ncclInvalidUsage, "the communicator is finalized already, not active: destroy it");
  }
  const ContextScope scope(comm->context);
  NCCL_TRY(scope.result());
  return comm->flush();
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return comm == nullptr ? ncclSuccess : end(comm, false);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return comm == nullptr ? ncclSuccess : end(comm, true);
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  NCCL_TRY(check_handle(comm));
  if (flags != 0) return fail(ncclInvalidArgument, "the revoke flags are %d, not 0: pass 0", flags);
  comm->revoked = true;
  comm->stop();
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  NCCL_TRY(check_handle(comm));
  NCCL_TRY(check_output(error, "error"));
  *error = comm->async_error();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
  NCCL_TRY(check_handle(comm));
  NCCL_TRY(check_output(count, "count"));
  *count = comm->size;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) {
  NCCL_TRY(check_handle(comm));
  NCCL_TRY(check_output(device, "device"));
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
  NCCL_TRY(check_handle(comm));
  NCCL_TRY(check_output(rank, "rank"));
  *rank = comm->rank;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
  return result_name(result);
}

const char *ncclGetLastError(ncclComm_t comm) {
  const bool own = is_live(comm) && *comm->async_message() != '\0';
  return own ? comm->async_message() : last_error();
}

ncclResult_t declare(ncclComm_t comm, int size, int rank) {
  NCCL_TRY(check_handle(comm));
  NCCL_TRY(check_place(size, rank));
  return comm->declare(size, rank);
}

}  // namespace ncclstub::api
