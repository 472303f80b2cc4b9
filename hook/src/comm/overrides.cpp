// SPDX-License-Identifier: Apache-2.0
//
// NCCL's functions.  Everything that NCCL does to the driver meanwhile is on behalf of communication.
#include <memory>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "comm/nccl.h"
#include "comm/state.h"
#include "graphs/creation.h"
#include "interpose/concepts.h"
#include "support/captures.h"
#include "support/log.h"
#include "support/mode.h"
#include "support/owner.h"

namespace foundryd::comm {
namespace {

bool watching() noexcept {
  return overriding() && !inside_nccl();
}

// NCCL has the last word: whatever goes wrong in the recording must not reach the program.
template <class Body>
bool record(const char *what, Body &&body) noexcept {
  try {
    body();
    return true;
  } catch (const std::exception &error) {
    warn("%s was not recorded: %s", what, error.what());
    return false;
  }
}

// A placeholder that nobody knows as one would be restored as the copy that it is, so the graph must not be read.
void give_up(CUstream stream) noexcept {
  record("that a graph cannot be read", [&] {
    if (const graphs::Frontier at = graphs::frontier(stream); at.graph != nullptr)
      graphs::Creations::get().refuse(at.graph,
                                      "a collective of this graph could not be recorded: see the warning on "
                                      "standard error");
  });
}

template <class Call>
NcclResult as_communication(Call &&call) noexcept {
  const CommunicationScope scope;
  const InsideNccl inside;
  return call();
}

template <class Call>
NcclResult enqueue(const std::vector<PendingOp> &ops, Call &&call) noexcept {
  std::unique_ptr<Enqueue> watch;
  bool good = record("a captured collective", [&] { watch = std::make_unique<Enqueue>(ops); });
  const NcclResult result = as_communication(call);
  if (watch && accepted(result)) good = record("a captured collective", [&] { watch->finish(); });
  if (!good)
    for (const PendingOp &p : ops) give_up(p.stream);
  return result;
}

// Nothing to do with a placeholder: NCCL drops calls without elements, and a rank alone has nobody to talk to, so that
// NCCL makes a plain copy, or nothing, at once.
bool is_plain(fdy_comm_op_kind kind, size_t count, uint32_t slot) {
  return count == 0 || (kind != FDY_COMM_SEND && kind != FDY_COMM_RECV && State::get().size_of(slot) == 1);
}

template <class Call>
NcclResult collective(fdy_comm_op_kind kind, const void *send, void *recv, size_t count, int datatype, int reduction,
                      int peer, NcclComm communicator, CUstream stream, Call &&call) noexcept {
  if (!watching()) return call();
  if (!capturing() || !captures::any()) return as_communication(call);
  std::vector<PendingOp> ops;  // one, or none
  const bool good = record("a captured collective", [&] {
    const uint32_t slot = State::get().slot_of(communicator);
    if (is_plain(kind, count, slot)) return;
    fdy_comm_op op{};
    op.send = reinterpret_cast<uintptr_t>(send);
    op.recv = reinterpret_cast<uintptr_t>(recv);
    op.count = count;
    op.kind = kind;
    op.datatype = static_cast<uint32_t>(datatype);
    op.reduction = reduction < 0 ? FDY_NONE : static_cast<uint32_t>(reduction);
    op.peer = peer < 0 ? FDY_NONE : static_cast<uint32_t>(peer);
    op.communicator = slot;
    ops.push_back({op, stream});
  });
  if (!good) give_up(stream);
  if (ops.empty()) return as_communication(call);
  if (group().depth == 0) return enqueue(ops, call);
  const NcclResult result = as_communication(call);
  if (accepted(result) && !record("a captured collective", [&] { group().ops.push_back(ops.front()); }))
    give_up(stream);
  return result;
}

template <class Call>
NcclResult creating(NcclComm *out, int size, int rank, Call &&call) noexcept {
  if (!watching()) return call();
  const NcclResult result = as_communication(call);
  if (!accepted(result) || out == nullptr) return result;
  record("a communicator", [&] {
    if (group().depth == 0) {
      State::get().created(*out, static_cast<uint32_t>(size), static_cast<uint32_t>(rank));
    } else {
      group().communicators.push_back({out, static_cast<uint32_t>(size), static_cast<uint32_t>(rank)});
    }
  });
  return result;
}

template <class Call>
NcclResult ending(NcclComm communicator, Call &&call) noexcept {
  if (!watching()) return call();
  // Forgotten first: another thread may be given the same handle as soon as NCCL lets it go.
  record("the end of a communicator", [&] { State::get().destroyed(communicator); });
  return as_communication(call);
}

}  // namespace
}  // namespace foundryd::comm

using namespace foundryd;
using namespace foundryd::comm;

FDY_OVERRIDE NcclResult ncclCommInitRank(NcclComm *out, int size, NcclUniqueId id, int rank) {
  return creating(out, size, rank, [&] { return FDY_NEXT(ncclCommInitRank, out, size, id, rank); });
}

FDY_OVERRIDE NcclResult ncclCommInitRankConfig(NcclComm *out, int size, NcclUniqueId id, int rank, void *config) {
  return creating(out, size, rank, [&] { return FDY_NEXT(ncclCommInitRankConfig, out, size, id, rank, config); });
}

FDY_OVERRIDE NcclResult ncclCommInitRankScalable(NcclComm *out, int size, int rank, int id_count, NcclUniqueId *ids,
                                                 void *config) {
  return creating(out, size, rank,
                  [&] { return FDY_NEXT(ncclCommInitRankScalable, out, size, rank, id_count, ids, config); });
}

FDY_OVERRIDE NcclResult ncclCommInitAll(NcclComm *out, int count, const int *devices) {
  if (!watching()) return FDY_NEXT(ncclCommInitAll, out, count, devices);
  const NcclResult result = as_communication([&] { return FDY_NEXT(ncclCommInitAll, out, count, devices); });
  if (accepted(result))
    record("communicators", [&] {
      for (int i = 0; i < count; ++i)
        State::get().created(out[i], static_cast<uint32_t>(count), static_cast<uint32_t>(i));
    });
  return result;
}

FDY_OVERRIDE NcclResult ncclCommSplit(NcclComm parent, int color, int key, NcclComm *out, void *config) {
  return creating(out, 0, 0, [&] { return FDY_NEXT(ncclCommSplit, parent, color, key, out, config); });
}

FDY_OVERRIDE NcclResult ncclCommShrink(NcclComm parent, int *excluded, int count, NcclComm *out, void *config,
                                       int flags) {
  return creating(out, 0, 0, [&] { return FDY_NEXT(ncclCommShrink, parent, excluded, count, out, config, flags); });
}

// Finalize only flushes; the handle lives until Destroy.
FDY_OVERRIDE NcclResult ncclCommFinalize(NcclComm communicator) {
  if (!watching()) return FDY_NEXT(ncclCommFinalize, communicator);
  return as_communication([&] { return FDY_NEXT(ncclCommFinalize, communicator); });
}

FDY_OVERRIDE NcclResult ncclCommDestroy(NcclComm communicator) {
  return ending(communicator, [&] { return FDY_NEXT(ncclCommDestroy, communicator); });
}

FDY_OVERRIDE NcclResult ncclCommAbort(NcclComm communicator) {
  return ending(communicator, [&] { return FDY_NEXT(ncclCommAbort, communicator); });
}

FDY_OVERRIDE NcclResult ncclGroupStart() {
  if (!watching()) return FDY_NEXT(ncclGroupStart);
  const NcclResult result = as_communication([&] { return FDY_NEXT(ncclGroupStart); });
  if (accepted(result)) ++group().depth;
  return result;
}

FDY_OVERRIDE NcclResult ncclGroupEnd() {
  if (!watching()) return FDY_NEXT(ncclGroupEnd);
  Group &mine = group();
  const auto call = [&] { return FDY_NEXT(ncclGroupEnd); };
  if (mine.depth > 1) {
    --mine.depth;
    return as_communication(call);
  }
  // The outermost end: now NCCL does everything, or fails and drops everything.
  const Group ended = std::exchange(mine, Group{});
  const NcclResult result = ended.ops.empty() ? as_communication(call) : enqueue(ended.ops, call);
  if (accepted(result))
    record("communicators", [&] {
      for (const PendingCommunicator &c : ended.communicators) State::get().created(*c.handle, c.size, c.rank);
    });
  return result;
}

// Ends the group without enqueueing anything.
FDY_OVERRIDE NcclResult ncclGroupSimulateEnd(void *info) {
  if (!watching()) return FDY_NEXT(ncclGroupSimulateEnd, info);
  if (group().depth > 1) {
    --group().depth;
  } else {
    group() = Group{};
  }
  return as_communication([&] { return FDY_NEXT(ncclGroupSimulateEnd, info); });
}

FDY_OVERRIDE NcclResult ncclAllReduce(const void *send, void *recv, size_t count, int datatype, int reduction,
                                      NcclComm communicator, CUstream stream) {
  return collective(FDY_COMM_ALL_REDUCE, send, recv, count, datatype, reduction, -1, communicator, stream, [&] {
    return FDY_NEXT(ncclAllReduce, send, recv, count, datatype, reduction, communicator, stream);
  });
}

FDY_OVERRIDE NcclResult ncclAllGather(const void *send, void *recv, size_t count, int datatype, NcclComm communicator,
                                      CUstream stream) {
  return collective(FDY_COMM_ALL_GATHER, send, recv, count, datatype, -1, -1, communicator, stream,
                    [&] { return FDY_NEXT(ncclAllGather, send, recv, count, datatype, communicator, stream); });
}

FDY_OVERRIDE NcclResult ncclReduceScatter(const void *send, void *recv, size_t count, int datatype, int reduction,
                                          NcclComm communicator, CUstream stream) {
  return collective(FDY_COMM_REDUCE_SCATTER, send, recv, count, datatype, reduction, -1, communicator, stream, [&] {
    return FDY_NEXT(ncclReduceScatter, send, recv, count, datatype, reduction, communicator, stream);
  });
}

FDY_OVERRIDE NcclResult ncclBroadcast(const void *send, void *recv, size_t count, int datatype, int root,
                                      NcclComm communicator, CUstream stream) {
  return collective(FDY_COMM_BROADCAST, send, recv, count, datatype, -1, root, communicator, stream,
                    [&] { return FDY_NEXT(ncclBroadcast, send, recv, count, datatype, root, communicator, stream); });
}

FDY_OVERRIDE NcclResult ncclBcast(void *data, size_t count, int datatype, int root, NcclComm communicator,
                                  CUstream stream) {
  return collective(FDY_COMM_BROADCAST, data, data, count, datatype, -1, root, communicator, stream,
                    [&] { return FDY_NEXT(ncclBcast, data, count, datatype, root, communicator, stream); });
}

FDY_OVERRIDE NcclResult ncclReduce(const void *send, void *recv, size_t count, int datatype, int reduction, int root,
                                   NcclComm communicator, CUstream stream) {
  return collective(FDY_COMM_REDUCE, send, recv, count, datatype, reduction, root, communicator, stream, [&] {
    return FDY_NEXT(ncclReduce, send, recv, count, datatype, reduction, root, communicator, stream);
  });
}

FDY_OVERRIDE NcclResult ncclAlltoAll(const void *send, void *recv, size_t count, int datatype, NcclComm communicator,
                                     CUstream stream) {
  return collective(FDY_COMM_ALL_TO_ALL, send, recv, count, datatype, -1, -1, communicator, stream,
                    [&] { return FDY_NEXT(ncclAlltoAll, send, recv, count, datatype, communicator, stream); });
}

FDY_OVERRIDE NcclResult ncclGather(const void *send, void *recv, size_t count, int datatype, int root,
                                   NcclComm communicator, CUstream stream) {
  return collective(FDY_COMM_GATHER, send, recv, count, datatype, -1, root, communicator, stream,
                    [&] { return FDY_NEXT(ncclGather, send, recv, count, datatype, root, communicator, stream); });
}

FDY_OVERRIDE NcclResult ncclScatter(const void *send, void *recv, size_t count, int datatype, int root,
                                    NcclComm communicator, CUstream stream) {
  return collective(FDY_COMM_SCATTER, send, recv, count, datatype, -1, root, communicator, stream,
                    [&] { return FDY_NEXT(ncclScatter, send, recv, count, datatype, root, communicator, stream); });
}

FDY_OVERRIDE NcclResult ncclSend(const void *send, size_t count, int datatype, int peer, NcclComm communicator,
                                 CUstream stream) {
  return collective(FDY_COMM_SEND, send, nullptr, count, datatype, -1, peer, communicator, stream,
                    [&] { return FDY_NEXT(ncclSend, send, count, datatype, peer, communicator, stream); });
}

FDY_OVERRIDE NcclResult ncclRecv(void *recv, size_t count, int datatype, int peer, NcclComm communicator,
                                 CUstream stream) {
  return collective(FDY_COMM_RECV, nullptr, recv, count, datatype, -1, peer, communicator, stream,
                    [&] { return FDY_NEXT(ncclRecv, recv, count, datatype, peer, communicator, stream); });
}

namespace foundryd::comm {

std::span<const Row> rows() {
  static const Row table[] = {
      FDY_NCCL_ROW(ncclCommInitRank),
      FDY_NCCL_ROW(ncclCommInitRankConfig),
      FDY_NCCL_ROW(ncclCommInitRankScalable),
      FDY_NCCL_ROW(ncclCommInitAll),
      FDY_NCCL_ROW(ncclCommSplit),
      FDY_NCCL_ROW(ncclCommShrink),
      FDY_NCCL_ROW(ncclCommFinalize),
      FDY_NCCL_ROW(ncclCommDestroy),
      FDY_NCCL_ROW(ncclCommAbort),
      FDY_NCCL_ROW(ncclGroupStart),
      FDY_NCCL_ROW(ncclGroupEnd),
      FDY_NCCL_ROW(ncclAllReduce),
      FDY_NCCL_ROW(ncclAllGather),
      FDY_NCCL_ROW(ncclReduceScatter),
      FDY_NCCL_ROW(ncclBroadcast),
      FDY_NCCL_ROW(ncclBcast),
      FDY_NCCL_ROW(ncclReduce),
      FDY_NCCL_ROW(ncclAlltoAll),
      FDY_NCCL_ROW(ncclGather),
      FDY_NCCL_ROW(ncclScatter),
      FDY_NCCL_ROW(ncclSend),
      FDY_NCCL_ROW(ncclRecv),
      FDY_NCCL_ROW(ncclGroupSimulateEnd),
  };
  return table;
}

}  // namespace foundryd::comm
