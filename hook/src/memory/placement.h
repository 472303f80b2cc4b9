// SPDX-License-Identifier: Apache-2.0
//
// Which addresses the allocations of one arena get: arithmetic only, no driver.  The same calls give the same addresses
// in every process, and a failed allocation that is released again leaves no trace.
//
// Small allocations share chunks of one granule; a large one has granules of its own, so that freeing it can give its
// memory back (a part of a mapping cannot be unmapped).  Freed space is reused lowest address first.
#ifndef FOUNDRYD_HOOK_MEMORY_PLACEMENT_H
#define FOUNDRYD_HOOK_MEMORY_PLACEMENT_H

#include <cstdint>
#include <map>
#include <optional>

namespace foundryd::memory {

inline constexpr uint64_t kGranule = 2u << 20;     // of mappings, and alignment of large allocations
inline constexpr uint64_t kAlignment = 512;        // of small ones in device memory
inline constexpr uint64_t kHostAlignment = 4096;   // and in host memory: programs open files for direct access with it
inline constexpr uint64_t kSmallLimit = 1u << 20;  // the largest small one

constexpr uint64_t round_up(uint64_t value, uint64_t to) {
  return (value + to - 1) / to * to;
}
constexpr uint64_t round_down(uint64_t value, uint64_t to) {
  return value / to * to;
}

struct Extent {
  uint64_t base;
  uint64_t bytes;
  uint64_t end() const { return base + bytes; }
  bool contains(uint64_t address) const { return address >= base && address - base < bytes; }
};

// What is mapped around a block.  The number tells it from whatever lies there before or after it.
struct Mapped {
  Extent extent;
  uint64_t number;
};

class Placement {
 public:
  // [base, base + bytes), both multiples of kGranule.
  Placement(uint64_t base, uint64_t bytes, uint64_t alignment = kAlignment);

  struct Placed {
    uint64_t address;
    std::optional<Extent> map;  // to be mapped before the address is used
  };

  // Throws Error if the arena has no room.
  Placed place(uint64_t bytes);
  // At an address below the floor; nothing if it is occupied.
  std::optional<Placed> place_at(uint64_t address, uint64_t bytes);
  // Whether place_at could ever give this: inside the arena, aligned, a small one inside one chunk.
  bool possible(uint64_t address, uint64_t bytes) const;
  // Frees the block that starts at `address` (there must be one).  Answers the extent that has no block any more.
  std::optional<Extent> release(uint64_t address);

  // What is mapped around the block that starts at `address` (there must be one).
  Mapped mapped_at(uint64_t address) const;

  // Nothing below `address` will be given by `place`.  Before the first placement.
  void raise_floor(uint64_t address);

  Extent span() const { return {base_, bytes_}; }

 private:
  struct Mapping {
    uint64_t bytes;
    uint32_t blocks;
    uint64_t number;
  };

  uint64_t rounded(uint64_t bytes) const;
  uint64_t take_granules(uint64_t bytes);
  void give_granules(Extent extent);
  void give_small(Extent extent);

  uint64_t base_, bytes_, alignment_, floor_;
  std::map<uint64_t, uint64_t> free_granules_;  // address -> bytes, coalesced
  std::map<uint64_t, uint64_t> free_small_;     // address -> bytes, inside chunks above the floor
  std::map<uint64_t, Mapping> mappings_;
  uint64_t numbers_ = 0;                 // given to mappings
  std::map<uint64_t, uint64_t> blocks_;  // address -> rounded bytes
};

}  // namespace foundryd::memory

#endif  // FOUNDRYD_HOOK_MEMORY_PLACEMENT_H
