// SPDX-License-Identifier: Apache-2.0
//
// How long a thread is in the driver, for whoever wants to know what comes on top of it.  Off unless switched on: a
// call then costs one more load.
#ifndef FOUNDRYD_HOOK_SUPPORT_CLOCK_H
#define FOUNDRYD_HOOK_SUPPORT_CLOCK_H

#include <atomic>
#include <cstdint>

namespace foundryd::clock {

// Of the calling thread, while the clock was on: the driver's calls, one inside another counting once.  Monotonic time,
// since a thread's CPU time would cost a system call for each of some thousand calls of a graph.
struct Spent {
  uint64_t ns;
  uint64_t calls;
};

inline constinit std::atomic<bool> on{false};

void enter() noexcept;
// False if nothing was entered.
bool leave() noexcept;
Spent spent() noexcept;

// Counts while it lives, if the clock was on when it began.
class Timed {
 public:
  Timed() noexcept : counted_(on.load(std::memory_order_relaxed)) {
    if (counted_) enter();
  }
  ~Timed() {
    if (counted_) leave();
  }
  Timed(const Timed &) = delete;
  Timed &operator=(const Timed &) = delete;

 private:
  const bool counted_;
};

}  // namespace foundryd::clock

#endif  // FOUNDRYD_HOOK_SUPPORT_CLOCK_H
