// SPDX-License-Identifier: Apache-2.0
//
// Which addresses the reservations get that an engine makes itself, for one arena: arithmetic only, no driver.  The
// same calls give the same addresses in every process.
//
// The lowest place that fits is given.  Between two reservations some addresses belong to nobody, so that whoever runs
// over the end of one meets a fault and not the other.
#ifndef FOUNDRYD_HOOK_MEMORY_RESERVATIONS_H
#define FOUNDRYD_HOOK_MEMORY_RESERVATIONS_H

#include <cstdint>
#include <map>
#include <optional>

#include "memory/placement.h"

namespace foundryd::memory {

inline constexpr uint64_t kReservationAlignment = 1u << 30;

class Reservations {
 public:
  explicit Reservations(Extent zone) : zone_(zone), floor_(zone.base) {}

  // Whole granules; `alignment` is a power of two, or 0.  Throws Error if there is no room.
  uint64_t place(uint64_t bytes, uint64_t alignment);
  // At this very place; whether it was free.
  bool place_at(uint64_t address, uint64_t bytes);
  // Whether place_at could ever succeed.
  bool possible(uint64_t address, uint64_t bytes) const;
  // Frees the reservation that starts at `address`, if there is one.
  std::optional<Extent> release(uint64_t address);
  // The reservation around an address.
  std::optional<Extent> around(uint64_t address) const;

  // Nothing below `address` will be given by `place`.  A lower floor than there is changes nothing.
  void raise_floor(uint64_t address);

  Extent zone() const { return zone_; }

 private:
  Extent zone_;
  uint64_t floor_;
  std::map<uint64_t, uint64_t> taken_;  // address -> bytes
};

}  // namespace foundryd::memory

#endif  // FOUNDRYD_HOOK_MEMORY_RESERVATIONS_H
