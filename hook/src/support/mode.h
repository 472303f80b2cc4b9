// SPDX-License-Identifier: Apache-2.0
//
// FOUNDRYD_MODE decides whether overrides do anything.
#ifndef FOUNDRYD_HOOK_SUPPORT_MODE_H
#define FOUNDRYD_HOOK_SUPPORT_MODE_H

#include "foundryd/hook.h"

namespace foundryd {

// Read from the environment once.
fdy_mode mode() noexcept;

inline bool capturing() noexcept { return mode() == FDY_MODE_CAPTURE; }
inline bool restoring() noexcept { return mode() == FDY_MODE_RESTORE; }

// Whether an override has work to do on this thread, now.  False with no mode set, inside a call that the hook itself
// made into the driver (drivers call their own exported functions), and in a forked child of a process that had
// contexts: CUDA does not work there, and the driver must say so itself.  Every override begins with
//   if (!overriding()) return FDY_NEXT(cuX, ...);
bool overriding() noexcept;

// Whether this process is a forked child of one that had contexts.
bool forked_with_contexts() noexcept;

// Contexts created or retained so far.
unsigned contexts() noexcept;
void note_context() noexcept;

}  // namespace foundryd

#endif  // FOUNDRYD_HOOK_SUPPORT_MODE_H
