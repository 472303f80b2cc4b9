// SPDX-License-Identifier: Apache-2.0
//
// Where work runs: a queue with one thread of its own, started with the first task.  It blocks, it never spins.
#ifndef SOFTCUDA_QUEUE_H
#define SOFTCUDA_QUEUE_H

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "failure.h"

namespace softcuda {

// Something that happens once.
class Fence {
 public:
  void signal();
  void wait();
  bool done() const;
  // When it was signalled, on the monotonic clock.
  int64_t nanoseconds() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  int64_t nanoseconds_ = 0;
};

// The first error of a context's asynchronous work.  It sticks.
using Fault = std::atomic<CUresult>;

class Queue;

// A point in a queue: everything submitted up to it.
struct Mark {
  std::shared_ptr<Queue> queue;
  uint64_t sequence = 0;

  bool done() const;
  void wait() const;
};

void wait_all(const std::vector<Mark> &marks);

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  using Task = std::function<void()>;

  explicit Queue(std::shared_ptr<Fault> fault) : fault_(std::move(fault)) {}

  Mark submit(Task task);
  // Submits a task that first waits for points in other queues.
  Mark submit_after(std::vector<Mark> before, Task task);
  Mark tail();
  // The thread ends once the queue is empty.
  void close();

 private:
  friend struct Mark;

  void start();
  void work();

  std::shared_ptr<Fault> fault_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable finished_;
  std::deque<Task> tasks_;
  uint64_t submitted_ = 0;
  uint64_t completed_ = 0;
  bool started_ = false;
  bool closing_ = false;
};

}  // namespace softcuda

#endif  // SOFTCUDA_QUEUE_H
