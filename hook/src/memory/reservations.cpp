// SPDX-License-Identifier: Apache-2.0
#include "memory/reservations.h"

#include <algorithm>
#include <iterator>

#include "support/error.h"

namespace foundryd::memory {

uint64_t Reservations::place(uint64_t bytes, uint64_t alignment) {
  const uint64_t unit = std::max(alignment, kReservationAlignment);
  const auto fits = [&](uint64_t at, uint64_t end) { return at >= zone_.base && at <= end && bytes <= end - at; };
  if (unit <= zone_.bytes) {  // else rounding could leave the numbers
    uint64_t at = round_up(floor_, unit);
    for (const auto &[address, size] : taken_) {
      if (address + size <= floor_) continue;
      if (address > kGranule && fits(at, address - kGranule)) break;
      at = std::max(at, round_up(address + size + kGranule, unit));
    }
    if (fits(at, zone_.end())) {
      taken_.emplace(at, bytes);
      return at;
    }
  }
  throw Error(FDY_ERROR_MEMORY,
              "the engine reserves %llu bytes of address space, and %zu reservations leave no room for it in the %llu "
              "that an arena has for them: raise FOUNDRYD_ARENA_STRIDE, and lower FOUNDRYD_ARENA_BASE if that does not "
              "fit below 2^47",
              static_cast<unsigned long long>(bytes), taken_.size(), static_cast<unsigned long long>(zone_.bytes))
      .answered_with(CUDA_ERROR_OUT_OF_MEMORY);
}

bool Reservations::possible(uint64_t address, uint64_t bytes) const {
  return bytes != 0 && bytes % kGranule == 0 && address % kGranule == 0 && zone_.contains(address) &&
         bytes <= zone_.end() - address;
}

bool Reservations::place_at(uint64_t address, uint64_t bytes) {
  if (!possible(address, bytes)) return false;
  const auto next = taken_.lower_bound(address);
  if (next != taken_.end() && next->first < address + bytes) return false;
  if (next != taken_.begin() && around(address)) return false;
  taken_.emplace(address, bytes);
  return true;
}

std::optional<Extent> Reservations::release(uint64_t address) {
  const auto at = taken_.find(address);
  if (at == taken_.end()) return std::nullopt;
  const Extent freed{at->first, at->second};
  taken_.erase(at);
  return freed;
}

std::optional<Extent> Reservations::around(uint64_t address) const {
  auto at = taken_.upper_bound(address);
  if (at == taken_.begin()) return std::nullopt;
  --at;
  const Extent found{at->first, at->second};
  return found.contains(address) ? std::optional(found) : std::nullopt;
}

void Reservations::raise_floor(uint64_t address) {
  floor_ = std::max(floor_, address);
}

}  // namespace foundryd::memory
