// SPDX-License-Identifier: Apache-2.0
#ifndef FOUNDRYD_HOOK_INTERPOSE_LOOKUP_H
#define FOUNDRYD_HOOK_INTERPOSE_LOOKUP_H

#include "interpose/concepts.h"

namespace foundryd::interpose {

// How many rows have found the function that they stand in front of.
unsigned installed() noexcept;

}  // namespace foundryd::interpose

#endif  // FOUNDRYD_HOOK_INTERPOSE_LOOKUP_H
