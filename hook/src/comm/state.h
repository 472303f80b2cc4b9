// SPDX-License-Identifier: Apache-2.0
//
// Communicators by slot, and the collectives that were called under capture.
#ifndef FOUNDRYD_HOOK_COMM_STATE_H
#define FOUNDRYD_HOOK_COMM_STATE_H

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "comm/nccl.h"
#include "foundryd/records.h"

namespace foundryd::comm {

// What is needed to issue calls on a communicator again.
struct Lane {
  std::mutex mutex;           // one capture on a communicator at a time
  CUstream stream = nullptr;  // private; made at first use
};

struct LiveCommunicator {
  NcclComm handle;
  uint32_t slot;
  std::shared_ptr<Lane> lane;
};

class State {
 public:
  static State &get();

  // A new communicator takes the next slot; `size` 0 means that only the library knows, as after a split.  Every
  // communicator gets one, those of a single rank too: slots are places in the program's own order of creation.
  void created(NcclComm communicator, uint32_t size, uint32_t rank);
  void destroyed(NcclComm communicator);
  // Its world ranks, in the communicator's order.  Under capture the stub learns the true size of a split from this.
  // Communicators are told apart by the order of their declarations; none takes the place of one that is not made here.
  void declare(NcclComm communicator, std::span<const uint32_t> ranks);
  void list(std::vector<fdy_communicator> &communicators, std::vector<uint32_t> &ranks);

  // The slot of a handle; a handle that was never seen being made gets one now.
  uint32_t slot_of(NcclComm communicator);
  uint32_t size_of(uint32_t slot);       // 0 if the library cannot say
  LiveCommunicator live(uint32_t slot);  // throws Error

  uint32_t next_group();
  void add_ops(std::span<const fdy_comm_op> ops);
  std::vector<fdy_comm_op> ops() const;

 private:
  struct Communicator {
    NcclComm handle;
    uint32_t size;
    uint32_t rank;
    bool derived;  // by a split or shrink, which do not say how large the child is
    bool live;
    uint32_t declared;  // FDY_NONE until it is
    std::vector<uint32_t> members;
    std::shared_ptr<Lane> lane;
  };
  static void ask(Communicator &communicator);
  static void tell_stub(Communicator &communicator, std::span<const uint32_t> ranks);

  mutable std::mutex mutex_;
  std::deque<Communicator> communicators_;
  std::unordered_map<NcclComm, uint32_t> slots_;  // live handles
  std::vector<fdy_comm_op> ops_;
  uint32_t groups_ = 0;
  uint32_t declarations_ = 0;
};

}  // namespace foundryd::comm

#endif  // FOUNDRYD_HOOK_COMM_STATE_H
