// SPDX-License-Identifier: Apache-2.0
//
// Memory that an engine maps itself into address space that it reserved, as PyTorch's expandable segments do.  The
// arenas choose the place of each reservation and record what is mapped there; all else is the driver's.
//
// An arena's space for reservations is taken whole with the first one, and never given back: an H200 does not give a
// place that has been freed, or a small one, whenever it is asked for it.
#include "memory/state.h"
#include "support/driver.h"
#include "support/mode.h"
#include "support/owner.h"

namespace foundryd::memory {

// Held ranges in there are mapped later, and nothing may settle between them before.  In the other arenas the engine
// reserves again what it reserved when it was recorded.
void Arenas::keep_reservations_locked() {
  for (Arena &arena : arenas_) {
    if (arena.recorded.by_ordinal()) continue;
    const Extent zone = arena.reservations.zone();
    const uint64_t high = arena.recorded.high_water(zone);
    if (high == 0) continue;
    keep_zone_locked(arena);
    arena.reservations.raise_floor(high);
  }
}

void Arenas::keep_zone_locked(Arena &arena) {
  if (arena.zone_kept) return;
  backing_.reserve_at(arena.reservations.zone());
  arena.zone_kept = true;
}

bool Arenas::serves_reservations() {
  if (communicating()) return false;
  CUdevice device = 0;
  if (FDY_CU_RESULT(cuCtxGetDevice, &device) == CUDA_SUCCESS) return serves(device);
  std::lock_guard guard(lock_);
  if (state_ == State::ready && backing_.bound()) return true;  // the session's device, since no other is meant
  if (capturing())
    throw Error(FDY_ERROR_STATE,
                "address space is reserved on a thread without a CUDA context, so that its device is not known: make "
                "a context current first")
        .answered_with(CUDA_ERROR_INVALID_CONTEXT);
  return false;
}

uint64_t Arenas::reserve(fdy_arena which, uint64_t bytes, uint64_t alignment) {
  std::lock_guard guard(lock_);
  Arena &arena = arenas_[which];
  const uint64_t address = arena.reservations.place(bytes, alignment);
  try {
    keep_zone_locked(arena);
  } catch (...) {
    arena.reservations.release(address);
    throw;
  }
  return address;
}

CUresult Arenas::unreserve(uint64_t address, uint64_t bytes) {
  std::lock_guard guard(lock_);
  Arena *arena = arena_of_locked(address);
  const auto found = arena ? arena->reservations.around(address) : std::nullopt;
  if (!found || found->base != address || found->bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto piece = arena->live.lower_bound(address);
  if (piece != arena->live.end() && piece->first < found->end()) return CUDA_ERROR_INVALID_VALUE;
  arena->reservations.release(address);
  return CUDA_SUCCESS;
}

bool Arenas::reservable(uint64_t address) const noexcept {
  return !forked_with_contexts() && state_.load(std::memory_order_acquire) == State::ready &&
         !space_.contains(address) && space_.arena_of(address) != FDY_ARENA_COUNT;
}

bool Arenas::keeps_space_around(uint64_t address) noexcept {
  if (!reservable(address)) return false;
  std::lock_guard guard(lock_);
  const Arena *arena = arena_of_locked(address);
  return arena && arena->zone_kept && arena->reservations.zone().contains(address);
}

std::optional<Extent> Arenas::reservation(uint64_t address) noexcept {
  if (!reservable(address)) return std::nullopt;
  std::lock_guard guard(lock_);
  const Arena *arena = arena_of_locked(address);
  return arena ? arena->reservations.around(address) : std::nullopt;
}

void Arenas::mapped(uint64_t address, uint64_t bytes) {
  std::lock_guard guard(lock_);
  Arena *arena = arena_of_locked(address);
  if (!arena) return;
  if (layout_space_) {
    const auto recorded = arena->recorded.follow(arena->made, bytes);
    if (recorded && *recorded != address) arena->recorded.diverge(FDY_DIVERGENCE_ADDRESS, arena->made, bytes);
  }
  record_locked(*arena, address, bytes, false);
}

void Arenas::forget_pieces_locked(Arena &arena, Extent extent) {
  auto at = arena.live.upper_bound(extent.base);
  if (at != arena.live.begin() && Extent{std::prev(at)->first, std::prev(at)->second.bytes}.contains(extent.base)) --at;
  while (at != arena.live.end() && at->first < extent.end()) {
    note_freed_locked(arena, at->second);
    at = arena.live.erase(at);
  }
}

void Arenas::unmapped(uint64_t address, uint64_t bytes) {
  std::lock_guard guard(lock_);
  if (Arena *arena = arena_of_locked(address)) forget_pieces_locked(*arena, {address, bytes});
}

}  // namespace foundryd::memory
