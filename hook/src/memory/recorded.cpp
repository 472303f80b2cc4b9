// SPDX-License-Identifier: Apache-2.0
#include "memory/recorded.h"

#include <algorithm>

#include "support/error.h"

namespace foundryd::memory {

void Recorded::set(std::vector<fdy_allocation> sequence) {
  for (size_t i = 0; i < sequence.size(); ++i) {
    if (sequence[i].ordinal != i)
      throw Error(FDY_ERROR_INVALID, "the layout of arena %u has ordinal %u where %zu must be: the archive is damaged",
                  static_cast<unsigned>(arena_), sequence[i].ordinal, i);
  }
  sequence_ = std::move(sequence);
}

const fdy_allocation *Recorded::at(uint32_t ordinal) const {
  return ordinal < sequence_.size() ? &sequence_[ordinal] : nullptr;
}

uint64_t Recorded::high_water(Extent span) const {
  uint64_t high = 0;
  for (const fdy_allocation &one : sequence_)
    if (span.contains(one.address)) high = std::max(high, one.address + one.bytes);
  return high;
}

bool Recorded::by_ordinal() const {
  return arena_ != FDY_ARENA_DEFAULT && arena_ != FDY_ARENA_GRAPH;
}

std::optional<uint64_t> Recorded::follow(uint32_t ordinal, uint64_t bytes) {
  if (!by_ordinal() || !following_) return std::nullopt;
  const fdy_allocation *recorded = at(ordinal);
  if (recorded && recorded->bytes == bytes) return recorded->address;
  if (recorded)
    diverge(FDY_DIVERGENCE_SIZE, ordinal, bytes);
  else if (arena_ == FDY_ARENA_HOST)
    stop();  // staging buffers beyond the recorded ones lie above them and disturb nothing
  else
    diverge(FDY_DIVERGENCE_EXTRA, ordinal, bytes);
  return std::nullopt;
}

void Recorded::diverge(fdy_divergence_kind kind, uint32_t ordinal, uint64_t actual_bytes) {
  following_ = false;
  if (first_.kind != FDY_DIVERGENCE_NONE) return;
  const fdy_allocation *recorded = at(ordinal);
  first_ = {.kind = static_cast<uint32_t>(kind),
            .arena = static_cast<uint32_t>(arena_),
            .ordinal = ordinal,
            .reserved = 0,
            .expected_bytes = recorded ? recorded->bytes : 0,
            .actual_bytes = actual_bytes};
}

fdy_divergence Recorded::compare(std::span<const fdy_allocation> live) const {
  if (first_.kind != FDY_DIVERGENCE_NONE) return first_;
  // Host buffers that only warm-up or capture made are mapped with the held ranges, like those of `default`.
  if (!by_ordinal() || arena_ == FDY_ARENA_HOST) return {};
  for (const fdy_allocation &one : sequence_) {
    const uint32_t here = one.ordinal < live.size() ? live[one.ordinal].live : 0;
    if (here == one.live) continue;
    const bool missing = one.ordinal >= live.size();
    return {.kind = missing ? FDY_DIVERGENCE_MISSING : FDY_DIVERGENCE_LIFETIME,
            .arena = static_cast<uint32_t>(arena_),
            .ordinal = one.ordinal,
            .reserved = 0,
            .expected_bytes = one.bytes,
            .actual_bytes = missing ? 0 : one.bytes};
  }
  return {};
}

}  // namespace foundryd::memory
