// SPDX-License-Identifier: Apache-2.0
//
// What the rest of the hook asks about memory.  All functions may be called from any thread.
#ifndef FOUNDRYD_HOOK_MEMORY_ARENAS_H
#define FOUNDRYD_HOOK_MEMORY_ARENAS_H

#include <cstdint>
#include <optional>

#include "foundryd/records.h"

namespace foundryd::memory {

// Selects the arena for allocations of the calling thread.  Throw Error for an unknown arena and for a pop too many.
void push_arena(uint32_t arena);
void pop_arena();

// Selects an arena while it lives.
class ArenaScope {
 public:
  explicit ArenaScope(fdy_arena arena) { push_arena(arena); }
  ~ArenaScope();
  ArenaScope(const ArenaScope &) = delete;
  ArenaScope &operator=(const ArenaScope &) = delete;
};

// Where an address lies inside one of the arenas' live allocations or held ranges.
struct Place {
  fdy_arena arena;
  uint32_t ordinal;
  uint64_t base;    // of the allocation
  uint64_t bytes;   // of the allocation, as requested
  uint64_t offset;  // of the address in it
};
std::optional<Place> classify(uint64_t address) noexcept;

// Whether [address, address + bytes) lies wholly inside one live allocation or held range.
bool is_live_arena_range(uint64_t address, uint64_t bytes) noexcept;

// Whether the address lies in the arenas' address space at all, allocated or not.
bool in_arena_space(uint64_t address) noexcept;

// Whether there may be memory that a graph may not use, since no restore could bring it back.
bool has_foreign_memory() noexcept;

// What such memory is called and what to do, if [address, address + bytes) touches some; else nullptr.
const char *foreign_memory(uint64_t address, uint64_t bytes) noexcept;

// Whether a word is the number of a texture or surface object of this process.
bool is_texture_or_surface(uint64_t word) noexcept;

}  // namespace foundryd::memory

#endif  // FOUNDRYD_HOOK_MEMORY_ARENAS_H
