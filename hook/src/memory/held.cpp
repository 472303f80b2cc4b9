// SPDX-License-Identifier: Apache-2.0
//
// What a restore must reproduce: the recorded layout, where this process left it, and the ranges held for the graphs.
#include <algorithm>
#include <cstring>

#include "memory/state.h"
#include "support/driver.h"
#include "support/log.h"
#include "support/mode.h"

namespace foundryd::memory {
namespace {

using Long = unsigned long long;
using Sequences = std::array<std::vector<fdy_allocation>, FDY_ARENA_COUNT>;

// An archive is checked before it is believed: a live range that overlaps another, or lies outside its arena, would
// fail only when it is mapped, half-way through a restore.
void check_layout(const Sequences &sequences, const Space &space) {
  check_space(space);
  for (uint32_t i = 0; i < FDY_ARENA_COUNT; ++i) {
    Placement trial = placement_of(space, static_cast<fdy_arena>(i));
    trial.raise_floor(trial.span().end());
    Reservations pieces(i == FDY_ARENA_HOST ? Extent{0, 0} : space.reservations_of(i));
    for (const fdy_allocation &one : sequences[i]) {
      const bool mapped = pieces.zone().contains(one.address);
      const bool possible = mapped ? pieces.possible(one.address, one.bytes) : trial.possible(one.address, one.bytes);
      if (!possible || (one.live && !(mapped ? pieces.place_at(one.address, one.bytes)
                                             : trial.place_at(one.address, one.bytes).has_value())))
        throw Error(FDY_ERROR_INVALID,
                    "the layout has allocation %u of arena %u (%llu bytes at 0x%llx) outside the arena or over another "
                    "one: the archive is damaged",
                    one.ordinal, i, static_cast<Long>(one.bytes), static_cast<Long>(one.address));
    }
  }
}

void zero(fdy_arena arena, uint64_t address, uint64_t bytes) {
  if (arena == FDY_ARENA_HOST) {
    std::memset(reinterpret_cast<void *>(address), 0, bytes);
  } else {
    FDY_CU(cuMemsetD8_v2, address, 0, bytes);
  }
}

}  // namespace

void Arenas::set_layout(const fdy_layout &layout) {
  if (!restoring())
    throw Error(FDY_ERROR_STATE, "a layout is set with FOUNDRYD_MODE=%s, not restore: start the program under restore",
                capturing() ? "capture" : "(unset)");
  if (layout.allocation_count && !layout.allocations)
    throw Error(FDY_ERROR_INVALID, "the layout has %llu allocations and no array: give both",
                static_cast<Long>(layout.allocation_count));
  refuse_after_fork();
  Sequences sequences;
  for (uint64_t i = 0; i < layout.allocation_count; ++i) {
    const fdy_allocation &one = layout.allocations[i];
    if (one.arena >= FDY_ARENA_COUNT)
      throw Error(FDY_ERROR_INVALID, "the layout has arena %u, of %d: the archive is damaged", one.arena,
                  FDY_ARENA_COUNT);
    sequences[one.arena].push_back(one);
  }
  const Space space{layout.arena_base, layout.arena_stride};
  for (uint32_t i = 0; i < FDY_ARENA_COUNT; ++i) {
    std::stable_sort(sequences[i].begin(), sequences[i].end(),
                     [](const fdy_allocation &a, const fdy_allocation &b) { return a.ordinal < b.ordinal; });
    Recorded(static_cast<fdy_arena>(i)).set(sequences[i]);
  }
  check_layout(sequences, space);
  std::lock_guard guard(lock_);
  if (state_ != State::unreserved || contexts() != 0)
    throw Error(
        FDY_ERROR_STATE,
        "the layout comes after the process's first CUDA context (%u so far), when addresses are already given: "
        "attach before anything uses the GPU",
        contexts());
  layout_ = std::move(sequences);
  layout_space_ = space;
}

void Arenas::require_layout_locked() {
  if (!layout_space_)
    throw Error(FDY_ERROR_STATE, "there is no layout to compare with: attach before the process's first CUDA context");
  if (state_ == State::failed) throw *failure_;
  if (state_ == State::unreserved)
    throw Error(FDY_ERROR_STATE, "the process has no CUDA context yet, so nothing is allocated: make one first");
}

fdy_divergence Arenas::divergence() {
  refuse_after_fork();
  std::lock_guard guard(lock_);
  require_layout_locked();
  for (const fdy_arena id : {FDY_ARENA_WEIGHTS, FDY_ARENA_KV, FDY_ARENA_IO, FDY_ARENA_HOST}) {
    const fdy_divergence found = arenas_[id].recorded.compare(arenas_[id].history);
    if (found.kind != FDY_DIVERGENCE_NONE) return found;
  }
  return {};
}

void Arenas::release_held_locked(Arena &arena, uint64_t address, uint64_t bytes) {
  if (arena.reservations.zone().contains(address)) {
    backing_.unmap({address, bytes});
  } else {
    release_locked(arena, address);
  }
}

void Arenas::map_recorded_locked(Arena &arena, std::vector<std::pair<Arena *, fdy_allocation>> &mapped) {
  for (const fdy_allocation &one : arena.recorded.sequence()) {
    if (!one.live) continue;
    auto present = arena.live.find(one.address);
    if (present != arena.live.end() && present->second.bytes == one.bytes) continue;  // the engine's, or held already
    if (arena.reservations.zone().contains(one.address)) {
      backing_.map({one.address, one.bytes});  // into what keep_reservations_locked took
      mapped.emplace_back(&arena, one);
      arena.live.insert_or_assign(one.address, Live{one.bytes, one.ordinal, ++serial_, true, false});
      zero(arena.id, one.address, one.bytes);
      continue;
    }
    const auto placed = arena.placement.place_at(one.address, one.bytes);
    if (!placed)
      throw Error(
          FDY_ERROR_DIVERGED,
          "the recorded allocation %u of arena %u (%llu bytes at 0x%llx) lies over one that this process has and "
          "the recording had freed: free it before restoring",
          one.ordinal, one.arena, static_cast<Long>(one.bytes), static_cast<Long>(one.address));
    if (placed->map) {
      try {
        backing_.map(*placed->map);
      } catch (...) {
        arena.placement.release(one.address);
        throw;
      }
    }
    mapped.emplace_back(&arena, one);
    arena.live.emplace(one.address, Live{one.bytes, one.ordinal, ++serial_, true, false});
    zero(arena.id, one.address, one.bytes);
  }
}

void Arenas::map_held() {
  refuse_after_fork();
  CurrentContext current;
  {
    std::lock_guard guard(lock_);
    require_layout_locked();
    if (held_mapped_) return;
    if (!backing_.bound()) {
      CUdevice device = 0;
      FDY_CU(cuCtxGetDevice, &device);
      backing_.bind(device);
    }
    std::vector<std::pair<Arena *, fdy_allocation>> mapped;
    try {
      for (const fdy_arena id : {FDY_ARENA_DEFAULT, FDY_ARENA_GRAPH, FDY_ARENA_HOST})
        map_recorded_locked(arenas_[id], mapped);
    } catch (...) {
      FDY_CU_RESULT(cuCtxSynchronize);  // the fills
      for (const auto &[arena, one] : mapped) {
        arena->live.erase(one.address);
        release_held_locked(*arena, one.address, one.bytes);
      }
      throw;
    }
    for (Arena &arena : arenas_) {
      arena.recorded.stop();
      arena.reservations.raise_floor(arena.recorded.high_water(arena.reservations.zone()));
    }
    held_mapped_ = true;
    recording_ = false;
  }
  FDY_CU(cuCtxSynchronize);
}

void Arenas::release_held() {
  refuse_after_fork();
  CurrentContext current;
  FDY_CU(cuCtxSynchronize);
  std::lock_guard guard(lock_);
  require_layout_locked();
  for (Arena &arena : arenas_) {
    for (auto at = arena.live.begin(); at != arena.live.end();) {
      const auto [address, block] = *at;
      at = block.held ? arena.live.erase(at) : std::next(at);
      if (block.held) release_held_locked(arena, address, block.bytes);
    }
  }
  held_mapped_ = false;
}

}  // namespace foundryd::memory
