// SPDX-License-Identifier: Apache-2.0
//
// NCCL groups of the calling thread, and how recorded calls find their placeholder node.
#ifndef FOUNDRYD_HOOK_COMM_GROUP_H
#define FOUNDRYD_HOOK_COMM_GROUP_H

#include <cstdint>
#include <vector>

#include "comm/nccl.h"
#include "foundryd/records.h"
#include "graphs/creation.h"

namespace foundryd::comm {

struct PendingOp {
  fdy_comm_op op;  // without group
  CUstream stream;
};

// A communicator whose handle is written when the group ends.
struct PendingCommunicator {
  NcclComm *handle;
  uint32_t size;
  uint32_t rank;
};

struct Group {
  int depth = 0;
  std::vector<PendingOp> ops;
  std::vector<PendingCommunicator> communicators;
};

// Of the calling thread.
Group &group() noexcept;

// While one lives, the thread is inside an NCCL function: what that calls by exported names is not recorded.
class InsideNccl {
 public:
  InsideNccl() noexcept;
  ~InsideNccl();
  InsideNccl(const InsideNccl &) = delete;
  InsideNccl &operator=(const InsideNccl &) = delete;
};
bool inside_nccl() noexcept;

// Watches the streams of some calls while NCCL enqueues them, then assigns each (group, communicator) its placeholder.
class Enqueue {
 public:
  explicit Enqueue(std::vector<PendingOp> ops);  // before: where each stream stands
  // After NCCL accepted the calls.  A placeholder that cannot be found makes the graph unreadable, with the reason.
  void finish();

 private:
  struct Stream {
    CUstream handle;
    graphs::Frontier before;
  };
  void record(CUgraph graph, CUgraphNode placeholder, uint32_t slot) const;

  std::vector<PendingOp> ops_;
  std::vector<Stream> streams_;
};

}  // namespace foundryd::comm

#endif  // FOUNDRYD_HOOK_COMM_GROUP_H
