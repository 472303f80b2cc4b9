// SPDX-License-Identifier: Apache-2.0
//
// Sends and receives.  Between two ranks messages are matched in the order of the calls, as in NCCL.  Whatever can
// move does: a rank that waits, waits on its doorbell, which every peer rings when a channel between them has moved.
#include <cstring>
#include <vector>

#include "ncclstub/soft_wait.h"
#include "transport.h"

namespace ncclstub::soft {
namespace {

// The messages of a group in one direction between this rank and one peer.
struct Flow {
  OpKind kind;
  uint32_t peer;
  std::vector<const Op *> ops;
  size_t current = 0;
  uint64_t offset = 0;  // bytes of the current message that have moved

  bool done() const { return current == ops.size(); }
};

class Exchange {
 public:
  Exchange(CommState &state, const Op *ops, uint32_t count) : state_(state), segment_(*state.segment) {
    for (uint32_t i = 0; i < count; ++i) {
      Flow *flow = nullptr;
      for (Flow &known : flows_) {
        if (known.kind == ops[i].kind && known.peer == ops[i].peer) flow = &known;
      }
      if (flow == nullptr) flow = &flows_.emplace_back(Flow{ops[i].kind, ops[i].peer, {}});
      flow->ops.push_back(&ops[i]);
    }
  }

  void run() {
    const Word &doorbell = segment_.cell(state_.rank).doorbell;
    Deadline deadline(state_);
    for (;;) {
      const uint32_t heard = doorbell.load(std::memory_order_acquire);
      bool moved = false;
      const Flow *waiting = nullptr;
      for (Flow &flow : flows_) {
        while (!flow.done() && advance(flow)) moved = true;
        if (!flow.done()) waiting = &flow;
      }
      if (waiting == nullptr) return;
      if (moved) {
        deadline = Deadline(state_);
      } else {
        wait(doorbell, heard, deadline);
      }
    }
  }

 private:
  // Moves one slot if the channel has one; whether it did.
  bool advance(Flow &flow) { return flow.kind == OpKind::send ? send(flow) : receive(flow); }

  bool can_advance(const Flow &flow) {
    const bool sending = flow.kind == OpKind::send;
    const Channel &channel =
        sending ? segment_.channel(state_.rank, flow.peer) : segment_.channel(flow.peer, state_.rank);
    const uint32_t filled =
        channel.written.load(std::memory_order_acquire) - channel.read.load(std::memory_order_acquire);
    return sending ? filled < 2 : filled > 0;
  }

  static uint64_t message_bytes(const Op &op) { return op.count * type_bytes(op.type); }

  void moved(Flow &flow, uint64_t bytes) {
    flow.offset += bytes;
    if (flow.offset == message_bytes(*flow.ops[flow.current])) {
      ++flow.current;
      flow.offset = 0;
    }
    Word &doorbell = segment_.cell(flow.peer).doorbell;
    doorbell.fetch_add(1, std::memory_order_release);
    wake(doorbell);
  }

  bool send(Flow &flow) {
    if (!can_advance(flow)) return false;
    const Op &op = *flow.ops[flow.current];
    Channel &channel = segment_.channel(state_.rank, flow.peer);
    const uint32_t written = channel.written.load(std::memory_order_relaxed);
    const uint64_t bytes = std::min(message_bytes(op) - flow.offset, Segment::slot_bytes(segment_.size));
    std::memcpy(segment_.channel_data(state_.rank, flow.peer, written),
                reinterpret_cast<const std::byte *>(op.send) + flow.offset, bytes);
    channel.slots[written % 2] = {message_bytes(op), static_cast<uint32_t>(bytes), static_cast<uint32_t>(op.type)};
    channel.written.store(written + 1, std::memory_order_release);
    moved(flow, bytes);
    return true;
  }

  bool receive(Flow &flow) {
    if (!can_advance(flow)) return false;
    const Op &op = *flow.ops[flow.current];
    Channel &channel = segment_.channel(flow.peer, state_.rank);
    const uint32_t read = channel.read.load(std::memory_order_relaxed);
    const Channel::Slot slot = channel.slots[read % 2];
    if (slot.message_bytes != message_bytes(op) || slot.type != static_cast<uint32_t>(op.type)) {
      set_error(
          state_, ncclInvalidUsage,
          "rank %u receives %llu bytes of type %d from rank %u, which sends %llu of type %u: make the calls agree",
          state_.rank, static_cast<unsigned long long>(message_bytes(op)), op.type, flow.peer,
          static_cast<unsigned long long>(slot.message_bytes), slot.type);
      throw Failed{};
    }
    std::memcpy(reinterpret_cast<std::byte *>(op.recv) + flow.offset,
                segment_.channel_data(flow.peer, state_.rank, read), slot.bytes);
    channel.read.store(read + 1, std::memory_order_release);
    moved(flow, slot.bytes);
    return true;
  }

  void wait(const Word &doorbell, uint32_t heard, const Deadline &deadline) {
    if (state_.stopped) throw Stopped{};
    sleep_on(doorbell, heard);
    if (doorbell.load(std::memory_order_acquire) != heard) return;
    for (const Flow &flow : flows_) {
      if (flow.done()) continue;
      const auto can_move = [&] { return can_advance(flow); };
      switch (look(state_, flow.peer, deadline, op_name(flow.kind), can_move)) {
        case Waited::reached:
          break;
        case Waited::stopped:
          throw Stopped{};
        case Waited::failed:
          throw Failed{};
      }
    }
  }

  CommState &state_;
  Segment &segment_;
  std::vector<Flow> flows_;
};

}  // namespace

void run_point_to_point(CommState &state, const Op *ops, uint32_t count) {
  Exchange(state, ops, count).run();
}

}  // namespace ncclstub::soft
