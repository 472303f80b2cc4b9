// SPDX-License-Identifier: Apache-2.0
#include "comm/reissue.h"

#include <chrono>
#include <thread>
#include <utility>

#include "comm/group.h"
#include "comm/nccl.h"
#include "comm/state.h"
#include "graphs/made.h"
#include "interpose/table.h"
#include "support/captures.h"
#include "support/counters.h"
#include "support/error.h"
#include "support/owner.h"

namespace foundryd::comm {
namespace {

// A non-blocking communicator that makes no progress for this long has lost its peers.
constexpr std::chrono::seconds kProgressDeadline{300};

void check(NcclResult result, const char *call) {
  if (!accepted(result)) throw Error::nccl(result, call);
}

struct Issued {
  NcclResult result;
  const char *call;
};

Issued issue(const fdy_comm_op &op, NcclComm comm, CUstream stream) {
  const auto *send = reinterpret_cast<const void *>(static_cast<uintptr_t>(op.send));
  auto *recv = reinterpret_cast<void *>(static_cast<uintptr_t>(op.recv));
  const auto type = static_cast<int>(op.datatype), reduction = static_cast<int>(op.reduction),
             peer = static_cast<int>(op.peer);
  switch (static_cast<fdy_comm_op_kind>(op.kind)) {
    case FDY_COMM_ALL_REDUCE:
      return {FDY_NEXT(ncclAllReduce, send, recv, op.count, type, reduction, comm, stream), "ncclAllReduce"};
    case FDY_COMM_ALL_GATHER:
      return {FDY_NEXT(ncclAllGather, send, recv, op.count, type, comm, stream), "ncclAllGather"};
    case FDY_COMM_REDUCE_SCATTER:
      return {FDY_NEXT(ncclReduceScatter, send, recv, op.count, type, reduction, comm, stream), "ncclReduceScatter"};
    case FDY_COMM_BROADCAST:
      return {FDY_NEXT(ncclBroadcast, send, recv, op.count, type, peer, comm, stream), "ncclBroadcast"};
    case FDY_COMM_REDUCE:
      return {FDY_NEXT(ncclReduce, send, recv, op.count, type, reduction, peer, comm, stream), "ncclReduce"};
    case FDY_COMM_ALL_TO_ALL:
      return {FDY_NEXT(ncclAlltoAll, send, recv, op.count, type, comm, stream), "ncclAlltoAll"};
    case FDY_COMM_GATHER:
      return {FDY_NEXT(ncclGather, send, recv, op.count, type, peer, comm, stream), "ncclGather"};
    case FDY_COMM_SCATTER:
      return {FDY_NEXT(ncclScatter, send, recv, op.count, type, peer, comm, stream), "ncclScatter"};
    case FDY_COMM_SEND:
      return {FDY_NEXT(ncclSend, send, op.count, type, peer, comm, stream), "ncclSend"};
    case FDY_COMM_RECV:
      return {FDY_NEXT(ncclRecv, recv, op.count, type, peer, comm, stream), "ncclRecv"};
  }
  return {3, "ncclInternalError"};  // not reached: kinds are validated
}

void wait_for_progress(NcclComm comm) {
  const auto deadline = std::chrono::steady_clock::now() + kProgressDeadline;
  for (;;) {
    NcclResult state = kNcclSuccess;
    check(FDY_NEXT(ncclCommGetAsyncError, comm, &state), "ncclCommGetAsyncError");
    if (state == kNcclSuccess) return;
    check(state, "ncclCommGetAsyncError");
    if (std::chrono::steady_clock::now() > deadline)
      throw Error(FDY_ERROR_NCCL,
                  "NCCL made no progress on a re-issued call for %lld s: look for the rank that is behind",
                  static_cast<long long>(kProgressDeadline.count()));
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void issue_group(std::span<const fdy_comm_op> ops, NcclComm comm, CUstream stream) {
  const InsideNccl inside;
  bool in_progress = false;
  const auto take = [&](const Issued &issued) {
    check(issued.result, issued.call);
    in_progress |= issued.result == kNcclInProgress;
  };
  if (ops.size() == 1) {
    take(issue(ops.front(), comm, stream));
  } else {
    take({FDY_NEXT(ncclGroupStart), "ncclGroupStart"});
    try {
      for (const fdy_comm_op &op : ops) take(issue(op, comm, stream));
    } catch (...) {
      static_cast<void>(FDY_NEXT(ncclGroupEnd));  // leaves the group; the first failure is the one to tell
      throw;
    }
    take({FDY_NEXT(ncclGroupEnd), "ncclGroupEnd"});
  }
  if (in_progress) wait_for_progress(comm);
}

// A capture of the private stream that is ended on every way out.
class Capture {
 public:
  explicit Capture(CUstream stream) : stream_(stream) {
    FDY_CU(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    captures::began();
    count(&fdy_counters::captures);
  }
  ~Capture() {
    if (stream_ == nullptr) return;
    CUgraph graph = nullptr;
    FDY_CU_RESULT(cuStreamEndCapture, stream_, &graph);
    captures::ended();
    const graphs::GraphOwner owner(graph);
  }
  Capture(const Capture &) = delete;
  Capture &operator=(const Capture &) = delete;
  graphs::GraphOwner end() {
    CUgraph graph = nullptr;
    const CUresult code = FDY_CU_RESULT(cuStreamEndCapture, std::exchange(stream_, nullptr), &graph);
    captures::ended();
    driver::check(code, "cuStreamEndCapture");
    return graphs::GraphOwner(graph);
  }

 private:
  CUstream stream_;
};

void validate(std::span<const fdy_comm_op> ops) {
  if (ops.empty()) throw Error(FDY_ERROR_INVALID, "a group of no calls was to be issued: pass at least one");
  for (const fdy_comm_op &op : ops) {
    if (op.kind > FDY_COMM_RECV)
      throw Error(FDY_ERROR_INVALID, "communication call kind %u does not exist: the op list is damaged", op.kind);
    if (op.communicator != ops.front().communicator || op.group != ops.front().group)
      throw Error(FDY_ERROR_INVALID,
                  "calls of group %u on communicator %u and of group %u on communicator %u were passed "
                  "together: pass one group at a time",
                  ops.front().group, ops.front().communicator, op.group, op.communicator);
    const bool reduces =
        op.kind == FDY_COMM_ALL_REDUCE || op.kind == FDY_COMM_REDUCE_SCATTER || op.kind == FDY_COMM_REDUCE;
    if (reduces && op.reduction >= static_cast<uint32_t>(kNcclPredefinedReductions))
      throw Error(FDY_ERROR_INVALID, "reduction %u is not one of NCCL's own %d: the op list is damaged", op.reduction,
                  kNcclPredefinedReductions);
  }
}

}  // namespace

CUgraph reissue(std::span<const fdy_comm_op> ops) {
  validate(ops);
  const LiveCommunicator communicator = State::get().live(ops.front().communicator);
  const std::lock_guard lock(communicator.lane->mutex);
  const CommunicationScope scope;
  if (communicator.lane->stream == nullptr) FDY_CU(cuStreamCreate, &communicator.lane->stream, CU_STREAM_NON_BLOCKING);
  Capture capture(communicator.lane->stream);
  issue_group(ops, communicator.handle, communicator.lane->stream);
  graphs::GraphOwner graph = capture.end();
  graphs::MadeGraphs::get().add_small(graph.get(), communicator.slot);
  return graph.release();
}

}  // namespace foundryd::comm
