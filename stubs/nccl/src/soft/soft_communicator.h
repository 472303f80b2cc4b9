// SPDX-License-Identifier: Apache-2.0
#ifndef NCCLSTUB_SOFT_COMMUNICATOR_H
#define NCCLSTUB_SOFT_COMMUNICATOR_H

#include <deque>
#include <utility>

#include "communicator.h"
#include "soft/rendezvous.h"

namespace ncclstub::soft {

// What a launch needs for as long as its kernel may run: freed after the one run of an eager launch, with the last
// graph that has the node otherwise.
struct Plan {
  std::shared_ptr<CommState> state;
  std::vector<Op> ops;
  std::atomic<bool> finished{false};
};

class SoftCommunicator final : public ncclComm {
 public:
  // Blocks until all ranks are in.
  static ncclResult_t make(const Shape &shape, const Token &token, std::unique_ptr<ncclComm> *out);
  ~SoftCommunicator() override;

  ncclResult_t launch(const std::vector<Task> &tasks, CUstream stream, const Capture &capture) override;
  ncclResult_t split(int color, int key, const Config &child_config, std::unique_ptr<ncclComm> *child) override;
  ncclResult_t shrink(const std::vector<int> &excluded, const Config &child_config,
                      std::unique_ptr<ncclComm> *child) override;
  ncclResult_t flush() override;
  void stop() override { state_->stopped = true; }
  ncclResult_t async_error() override;
  const char *async_message() override;
  ncclResult_t declare(int true_size, int true_rank) override;

 private:
  std::vector<Op> lower(const std::vector<Task> &tasks);
  ncclResult_t launch_eager(KernelArgs args, std::unique_ptr<Plan> plan, CUstream stream);
  ncclResult_t launch_captured(KernelArgs args, std::unique_ptr<Plan> plan, CUstream stream, const Capture &capture);
  ncclResult_t launch_kernel(const KernelArgs &args, CUstream stream);
  // All ranks reach the same point on the host.
  ncclResult_t meet_on_host();

  Token token_{};
  std::shared_ptr<CommState> state_;
  CUfunction function_ = nullptr;
  CUevent serial_ = nullptr;  // after the last kernel of this communicator, eager or in a graph
  int shrinks_ = 0;
  bool flushed_ = true;  // whether every kernel is known to have ended

  std::mutex mutex_;  // over what follows
  std::deque<std::unique_ptr<Plan>> plans_;
  std::vector<std::pair<cuuint64_t, CUgraphNode>> records_;  // capture and its last record node of `serial_`
};

// The kernel, ready to launch in the current context.
ncclResult_t load_kernel(CUfunction *out);

}  // namespace ncclstub::soft

#endif  // NCCLSTUB_SOFT_COMMUNICATOR_H
