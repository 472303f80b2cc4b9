// SPDX-License-Identifier: Apache-2.0
//
// Collectives in steps: every rank copies a chunk to its stage, all reach the step, every rank reads the stages.
// Stages are doubled, by the parity of the step: a rank that reaches a step has read the one before, so the stage
// before that is free.  One wait a chunk.
#include <cstring>
#include <vector>

#include "ncclstub/soft_wait.h"
#include "reduce.h"
#include "transport.h"

namespace ncclstub::soft {
namespace {

void check(Waited waited) {
  if (waited == Waited::stopped) throw Stopped{};
  if (waited == Waited::failed) throw Failed{};
}

class Collective {
 public:
  Collective(CommState &state, const Op &op)
      : state_(state),
        segment_(*state.segment),
        op_(op),
        bytes_(type_bytes(op.type)),
        pieces_(is_sliced() ? state.size : 1),
        chunk_(kStageBytes / (pieces_ * bytes_)) {}

  void run() {
    for (uint64_t first = 0; first < op_.count; first += chunk_) {
      const uint64_t length = std::min(chunk_, op_.count - first);
      const uint32_t step = segment_.cell(state_.rank).steps.load(std::memory_order_relaxed);
      if (shows()) show(step, first, length);
      meet(step, first);
      take(step, first, length);
    }
  }

 private:
  // Whether a rank's input has a slice for each rank.
  bool is_sliced() const {
    return op_.kind == OpKind::reduce_scatter || op_.kind == OpKind::all_to_all || op_.kind == OpKind::scatter;
  }

  bool is_root() const { return op_.peer == state_.rank; }

  bool shows() const { return (op_.kind != OpKind::broadcast && op_.kind != OpKind::scatter) || is_root(); }

  std::byte *at(uint64_t base, uint64_t slice, uint64_t first) const {
    return reinterpret_cast<std::byte *>(base) + (slice * op_.count + first) * bytes_;
  }

  const std::byte *stage(uint32_t rank, uint32_t step, uint64_t piece = 0) const {
    return segment_.stage(rank, step) + piece * chunk_ * bytes_;
  }

  void show(uint32_t step, uint64_t first, uint64_t length) {
    uint64_t scalar = op_.scalar;
    if (op_.reduction == kPreMulSumOnDevice) std::memcpy(&scalar, reinterpret_cast<void *>(op_.scalar), bytes_);
    for (uint64_t piece = 0; piece < pieces_; ++piece) {
      std::byte *to = segment_.stage(state_.rank, step) + piece * chunk_ * bytes_;
      const std::byte *from = at(op_.send, piece, first);
      if (op_.reduction >= kPreMulSum) {
        scale(op_.type, scalar, to, from, length);
      } else {
        std::memcpy(to, from, length * bytes_);
      }
    }
  }

  // Reaches the step, waits for the others to, and compares what they do there.
  void meet(uint32_t step, uint64_t first) {
    RankCell &own = segment_.cell(state_.rank);
    Announcement &announced = own.announcement[step % 2];
    announced = {static_cast<uint32_t>(op_.kind),
                 static_cast<uint32_t>(op_.type),
                 std::min(op_.reduction, kPreMulSum),
                 op_.peer,
                 op_.count,
                 first};
    raise(own.steps, step + 1);
    for (uint32_t rank = 0; rank < state_.size; ++rank) {
      if (rank == state_.rank) continue;
      const RankCell &cell = segment_.cell(rank);
      check(wait_for(state_, rank, cell.steps, step + 1, op_name(op_.kind)));
      if (cell.announcement[step % 2] == announced) continue;
      const Announcement theirs = cell.announcement[step % 2];
      set_error(state_, ncclInvalidUsage,
                "rank %u calls %s (type %u, reduction %u, root %d, count %llu) where rank %u calls %s (type %u, "
                "reduction %u, root %d, count %llu): make the same calls in the same order",
                state_.rank, op_name(op_.kind), announced.type, announced.reduction, static_cast<int>(announced.root),
                static_cast<unsigned long long>(announced.count), rank, op_name(static_cast<OpKind>(theirs.kind)),
                theirs.type, theirs.reduction, static_cast<int>(theirs.root),
                static_cast<unsigned long long>(theirs.count));
      throw Failed{};
    }
  }

  void copy(uint64_t slice, uint64_t first, uint64_t length, const std::byte *from) {
    std::memcpy(at(op_.recv, slice, first), from, length * bytes_);
  }

  void reduce_stages(uint32_t step, uint64_t piece, uint64_t first, uint64_t length) {
    std::vector<const std::byte *> inputs;
    for (uint32_t rank = 0; rank < state_.size; ++rank) inputs.push_back(stage(rank, step, piece));
    reduce(op_.type, op_.reduction, at(op_.recv, 0, first), inputs, length);
  }

  void take(uint32_t step, uint64_t first, uint64_t length) {
    switch (op_.kind) {
      case OpKind::all_reduce:
        return reduce_stages(step, 0, first, length);
      case OpKind::reduce:
        if (is_root()) reduce_stages(step, 0, first, length);
        return;
      case OpKind::reduce_scatter:
        return reduce_stages(step, state_.rank, first, length);
      case OpKind::gather:
        if (!is_root()) return;
        [[fallthrough]];
      case OpKind::all_gather:
        for (uint32_t rank = 0; rank < state_.size; ++rank) copy(rank, first, length, stage(rank, step));
        return;
      case OpKind::all_to_all:
        for (uint32_t rank = 0; rank < state_.size; ++rank) copy(rank, first, length, stage(rank, step, state_.rank));
        return;
      case OpKind::broadcast:
        return copy(0, first, length, stage(op_.peer, step));
      case OpKind::scatter:
        return copy(0, first, length, stage(op_.peer, step, state_.rank));
      case OpKind::send:
      case OpKind::recv:
        return;  // run_point_to_point
    }
  }

  CommState &state_;
  Segment &segment_;
  const Op &op_;
  const uint64_t bytes_;   // of an element
  const uint64_t pieces_;  // slices in a stage
  const uint64_t chunk_;   // elements of each slice in a step
};

}  // namespace

void run_collective(CommState &state, const Op &op) {
  Collective(state, op).run();
}

}  // namespace ncclstub::soft
