// SPDX-License-Identifier: Apache-2.0
//
// What the soft library and its kernel share.  They are built from one tree but are two objects: the kernel reaches
// everything through its parameter.
//
//   Segment     one for a communicator, in shared memory, mapped by all its ranks
//   CommState   one for each rank, in its own memory; outlives the communicator while a graph holds it
//   KernelArgs  the kernel's one parameter: one group's operations on one communicator
#ifndef NCCLSTUB_SOFT_STATE_H
#define NCCLSTUB_SOFT_STATE_H

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "ncclstub/abi.h"
#include "ncclstub/op.h"

namespace ncclstub::soft {

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "a futex is a plain 32-bit word");

// ---- the segment --------------------------------------------------------------------------------------------------

inline constexpr uint32_t kMaxRanks = 256;
inline constexpr uint64_t kStageBytes = 128 << 10;  // what a rank shows the others in one step of a collective

// What a rank is about to do, so that a difference between ranks is an error and not wrong data.
struct Announcement {
  uint32_t kind, type, reduction, root;
  uint64_t count, first;
  bool operator==(const Announcement &) const = default;
};

struct alignas(64) RankCell {
  Word joined;                   // 1 from the time that the rank has mapped the segment
  Word left;                     // 1 from the time that it will take part no more
  Word steps;                    // steps of collectives that its kernels reached
  Word doorbell;                 // rung when a channel from or to this rank has moved
  Word host_steps;               // steps of collectives on the host: split
  int32_t color, key;            // of the split under way
  Announcement announcement[2];  // by the parity of `steps`, as is the staging
};

// Data on their way from one rank to one other: two slots.
struct alignas(64) Channel {
  struct Slot {
    uint64_t message_bytes;
    uint32_t bytes;
    uint32_t type;
  };
  Word written;  // slots filled, by the sender
  Word read;     // slots emptied, by the receiver
  Slot slots[2];
};

struct alignas(64) Segment {
  Word ready;     // 1 when what follows is set
  uint32_t size;  // ranks
  Word members;   // ranks that joined
  Word complete;  // 1 when all have: the segment has no name any more
  Word failed;    // 1 when a rank gave up waiting for the others to join

  RankCell &cell(uint32_t rank) { return reinterpret_cast<RankCell *>(this + 1)[rank]; }
  Channel &channel(uint32_t from, uint32_t to) {
    return reinterpret_cast<Channel *>(reinterpret_cast<RankCell *>(this + 1) + size)[from * size + to];
  }
  std::byte *channel_data(uint32_t from, uint32_t to, uint32_t slot) {
    auto *base = reinterpret_cast<std::byte *>(&channel(0, 0) + size * size);
    return base + (uint64_t{from * size + to} * 2 + slot % 2) * slot_bytes(size);
  }
  std::byte *stage(uint32_t rank, uint32_t step) {
    auto *base = channel_data(size, 0, 0);
    return base + (uint64_t{rank} * 2 + step % 2) * kStageBytes;
  }

  // All channels together stay within a few MiB.
  static uint64_t slot_bytes(uint64_t ranks) {
    return std::clamp<uint64_t>((uint64_t{2} << 20) / (ranks * ranks), 1 << 10, 32 << 10) / 64 * 64;
  }
  static uint64_t bytes(uint64_t ranks) {
    return sizeof(Segment) + ranks * sizeof(RankCell) + ranks * ranks * (sizeof(Channel) + 2 * slot_bytes(ranks)) +
           ranks * 2 * kStageBytes;
  }
};

// ---- a rank's side ------------------------------------------------------------------------------------------------

struct CommState {
  Segment *segment = nullptr;
  int descriptor = -1;  // of the segment; it holds this rank's lock, by which the others know that it lives
  uint32_t rank = 0;
  uint32_t size = 0;
  uint64_t timeout_ns = 0;
  std::atomic<bool> stopped{false};    // aborted or revoked: kernels return at once
  std::atomic<bool> destroyed{false};  // a graph may still hold a kernel: its replay fails
  std::mutex running;                  // one kernel of a communicator at a time

  // The first asynchronous error.  The message is complete once `error` is not ncclSuccess.
  std::atomic<bool> error_claimed{false};
  std::atomic<int> error{ncclSuccess};
  char message[384] = {};
};

// ---- the kernel's parameter ---------------------------------------------------------------------------------------

// Reductions beyond NCCL's: each rank multiplies its input by a scalar, which is `Op::scalar` or lies at that address.
inline constexpr uint32_t kPreMulSum = ncclNumOps;
inline constexpr uint32_t kPreMulSumOnDevice = ncclNumOps + 1;

struct Op {
  uint64_t send, recv;  // addresses
  uint64_t count;
  uint64_t scalar;
  OpKind kind;
  ncclDataType_t type;
  uint32_t reduction;
  uint32_t peer;
};
static_assert(sizeof(Op) == 48);

inline constexpr uint32_t kInlineOps = 84;

struct alignas(16) KernelArgs {
  CommState *state;
  const Op *ops;                // NULL: `inlined`
  std::atomic<bool> *finished;  // set when the kernel no longer needs `ops`; may be NULL
  uint32_t op_count;
  uint32_t collective_count;  // of which the first are collectives; the others are send and recv
  Op inlined[kInlineOps];
  uint8_t reserved[32];
};
static_assert(sizeof(KernelArgs) == 4096);

inline constexpr char kKernelName[] = "softncclDevKernel";

}  // namespace ncclstub::soft

#endif  // NCCLSTUB_SOFT_STATE_H
