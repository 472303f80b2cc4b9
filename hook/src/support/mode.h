// SPDX-License-Identifier: Apache-2.0
//
// FOUNDRYD_MODE decides whether overrides do anything.
#ifndef FOUNDRYD_HOOK_SUPPORT_MODE_H
#define FOUNDRYD_HOOK_SUPPORT_MODE_H

#include <atomic>

#include "foundryd/hook.h"
#include "support/driver.h"

namespace foundryd {

namespace detail {
inline constexpr int kModeUnread = -1;
inline constinit std::atomic<int> mode{kModeUnread};
inline constinit std::atomic<bool> forked{false};
fdy_mode read_mode() noexcept;
}  // namespace detail

// Read from the environment once.
inline fdy_mode mode() noexcept {
  const int known = detail::mode.load(std::memory_order_relaxed);
  return known == detail::kModeUnread ? detail::read_mode() : static_cast<fdy_mode>(known);
}

inline bool capturing() noexcept {
  return mode() == FDY_MODE_CAPTURE;
}
inline bool restoring() noexcept {
  return mode() == FDY_MODE_RESTORE;
}

// Whether an override has work to do on this thread, now.  False with no mode set, inside a call that the hook itself
// made into the driver (drivers call their own exported functions), and in a forked child of a process that had
// contexts: CUDA does not work there, and the driver must say so itself.  Every override begins with
//   if (!overriding()) return FDY_NEXT(cuX, ...);
inline bool overriding() noexcept {
  return mode() != FDY_MODE_OFF && !driver::inside() && !detail::forked.load(std::memory_order_relaxed);
}

// Whether this process is a forked child of one that had contexts.
inline bool forked_with_contexts() noexcept {
  return detail::forked.load(std::memory_order_relaxed);
}

// Contexts created or retained so far.
unsigned contexts() noexcept;
void note_context() noexcept;

}  // namespace foundryd

#endif  // FOUNDRYD_HOOK_SUPPORT_MODE_H
