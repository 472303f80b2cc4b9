// SPDX-License-Identifier: Apache-2.0
//
// Memory that is left to the driver, or to whoever made it, and remembered: no restore has it at the same address with
// the same bytes, so a graph that uses it cannot be restored.  Two captures may well have it at one address.
#ifndef FOUNDRYD_HOOK_MEMORY_FOREIGN_H
#define FOUNDRYD_HOOK_MEMORY_FOREIGN_H

#include <cstdint>

namespace foundryd::memory::foreign {

enum class Kind : uint8_t { none, managed, communication, other_device, registered };

void add(uint64_t address, uint64_t bytes, Kind kind);
void remove(uint64_t address) noexcept;  // of anything: most addresses are not here
// What the bytes from `address` touch.
Kind touched(uint64_t address, uint64_t bytes) noexcept;
// Texture and surface objects, which are numbers.
void add_object(uint64_t object);
void remove_object(uint64_t object) noexcept;
bool is_object(uint64_t word) noexcept;

// Whether there may be any of these.
bool any() noexcept;

// What to call it in a message, and what to do.
const char *name(Kind kind) noexcept;

}  // namespace foundryd::memory::foreign

#endif  // FOUNDRYD_HOOK_MEMORY_FOREIGN_H
