// SPDX-License-Identifier: Apache-2.0
#include "queue.h"

#include <pthread.h>
#include <signal.h>

#include <ctime>
#include <system_error>
#include <thread>
#include <utility>

namespace softcuda {

void Fence::signal() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const std::lock_guard lock(mutex_);
  done_ = true;
  nanoseconds_ = static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
  changed_.notify_all();
}

void Fence::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

bool Fence::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

int64_t Fence::nanoseconds() const {
  const std::lock_guard lock(mutex_);
  return nanoseconds_;
}

bool Mark::done() const {
  if (queue == nullptr) return true;
  const std::lock_guard lock(queue->mutex_);
  return queue->completed_ >= sequence;
}

void Mark::wait() const {
  if (queue == nullptr) return;
  std::unique_lock lock(queue->mutex_);
  queue->finished_.wait(lock, [this] { return queue->completed_ >= sequence; });
}

void wait_all(const std::vector<Mark> &marks) {
  for (const Mark &mark : marks) mark.wait();
}

Mark Queue::submit(Task task) {
  const std::lock_guard lock(mutex_);
  if (!started_) start();
  tasks_.push_back(std::move(task));
  arrived_.notify_one();
  return {shared_from_this(), ++submitted_};
}

Mark Queue::submit_after(std::vector<Mark> before, Task task) {
  if (before.empty()) return submit(std::move(task));
  return submit([before = std::move(before), task = std::move(task)] {
    wait_all(before);
    task();
  });
}

Mark Queue::tail() {
  const std::lock_guard lock(mutex_);
  if (completed_ == submitted_) return {};
  return {shared_from_this(), submitted_};
}

void Queue::close() {
  const std::lock_guard lock(mutex_);
  closing_ = true;
  arrived_.notify_one();
}

void Queue::start() {
  // The program's signals belong to the program's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([self = shared_from_this()] { self->work(); }).detach();
  } catch (const std::system_error &) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Failure{CUDA_ERROR_OPERATING_SYSTEM};
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  started_ = true;
}

void Queue::work() {
  pthread_setname_np(pthread_self(), "softcuda");
  std::unique_lock lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    {
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        task();
      } catch (...) {
        CUresult none = CUDA_SUCCESS;
        fault_->compare_exchange_strong(none, CUDA_ERROR_LAUNCH_FAILED);
      }
      // What the task held is let go before anyone learns that it is done.
    }
    lock.lock();
    ++completed_;
    finished_.notify_all();
  }
}

}  // namespace softcuda
