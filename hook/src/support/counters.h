// SPDX-License-Identifier: Apache-2.0
//
// The counters of fdy_report, by owner.
#ifndef FOUNDRYD_HOOK_SUPPORT_COUNTERS_H
#define FOUNDRYD_HOOK_SUPPORT_COUNTERS_H

#include <cstdint>

#include "foundryd/records.h"
#include "support/owner.h"

namespace foundryd {

// `which` is a member: count(&fdy_counters::launches).  Counts for the calling thread's owner.
void count(uint64_t fdy_counters::*which, uint64_t by = 1) noexcept;
fdy_counters counters(Owner owner) noexcept;

}  // namespace foundryd

#endif  // FOUNDRYD_HOOK_SUPPORT_COUNTERS_H
