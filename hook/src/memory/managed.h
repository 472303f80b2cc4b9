// SPDX-License-Identifier: Apache-2.0
//
// Managed memory is left to the driver and remembered: it migrates, so a graph that uses it cannot be restored.
#ifndef FOUNDRYD_HOOK_MEMORY_MANAGED_H
#define FOUNDRYD_HOOK_MEMORY_MANAGED_H

#include <cstdint>

namespace foundryd::memory::managed {

void add(uint64_t address, uint64_t bytes);
void remove(uint64_t address) noexcept;  // of anything: most addresses are not managed
bool touches(uint64_t address, uint64_t bytes) noexcept;

}  // namespace foundryd::memory::managed

#endif  // FOUNDRYD_HOOK_MEMORY_MANAGED_H
