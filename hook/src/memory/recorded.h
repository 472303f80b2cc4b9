// SPDX-License-Identifier: Apache-2.0
//
// The recorded sequence of one arena, followed by a process that restores.
#ifndef FOUNDRYD_HOOK_MEMORY_RECORDED_H
#define FOUNDRYD_HOOK_MEMORY_RECORDED_H

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "foundryd/records.h"
#include "memory/placement.h"

namespace foundryd::memory {

class Recorded {
 public:
  explicit Recorded(fdy_arena arena) : arena_(arena) {}

  // Ordinals 0, 1, 2, ...; throws Error otherwise.
  void set(std::vector<fdy_allocation> sequence);
  std::span<const fdy_allocation> sequence() const { return sequence_; }
  const fdy_allocation *at(uint32_t ordinal) const;
  // The first address above everything recorded inside `span`, 0 if nothing was.
  uint64_t high_water(Extent span) const;

  // weights, kv, io and host: the k-th allocation is the recorded one.  graph and default depend on what warm-up and
  // capture did, which a restore skips.
  bool by_ordinal() const;

  // The address for the next allocation, whose ordinal and size are given; nothing if it is free to go elsewhere.
  // Notes a divergence, the first one only, and from then on nothing is by ordinal.
  std::optional<uint64_t> follow(uint32_t ordinal, uint64_t bytes);
  void diverge(fdy_divergence_kind kind, uint32_t ordinal, uint64_t actual_bytes);
  // After the held ranges are mapped: later allocations are the program's own affair.
  void stop() { following_ = false; }

  // The divergence noted, else what is missing or lives otherwise now.  `live` are this process's allocations by
  // ordinal.
  fdy_divergence compare(std::span<const fdy_allocation> live) const;

 private:
  fdy_arena arena_;
  std::vector<fdy_allocation> sequence_;
  bool following_ = true;
  fdy_divergence first_{};
};

}  // namespace foundryd::memory

#endif  // FOUNDRYD_HOOK_MEMORY_RECORDED_H
