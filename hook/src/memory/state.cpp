// SPDX-License-Identifier: Apache-2.0
#include "memory/state.h"

#include <pthread.h>

#include <algorithm>
#include <new>

#include "support/captures.h"
#include "support/driver.h"
#include "support/log.h"
#include "support/mode.h"

namespace foundryd::memory {
Arenas &Arenas::instance() {
  // Never destroyed: threads of the program may still allocate while the process exits.
  alignas(Arenas) static unsigned char storage[sizeof(Arenas)];
  static Arenas *const arenas = [] {
    auto *made = new (storage) Arenas;
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return made;
  }();
  return *arenas;
}

// Another thread may have held the lock, or been in the middle of a change.  A child of a process that had contexts
// does not use the arenas any more (see mode.h); in any other there was nothing to change yet.  So the locks are
// made anew, and forking never waits for one: a handler that did would have to know the order of the driver's locks.
void Arenas::after_fork_in_child() {
  new (&instance().lock_) std::mutex;
  new (&instance().reserved_space_) std::mutex;
}

void Arenas::refuse_after_fork() {
  if (forked_with_contexts())
    throw Error(FDY_ERROR_STATE, "CUDA does not work in a forked child of a process that used it: spawn children");
}

void Arenas::context_made(CUcontext context) noexcept {
  note_context();
  CUcontext none = nullptr;
  context_.compare_exchange_strong(none, context);
  std::lock_guard guard(lock_);
  if (state_ == State::unreserved) reserve_locked();
}

void Arenas::fail_locked(const Error &error) noexcept {
  failure_ = error;
  state_ = State::failed;
  warn("%s", error.what());
}

void Arenas::reserve_locked() noexcept {
  try {
    space_ = layout_space_ ? *layout_space_ : space_from_environment();
    make_arenas_locked();
    backing_.reserve(space_);
    keep_reservations_locked();
    state_ = State::ready;
  } catch (const Error &error) {
    fail_locked(error);
  } catch (const std::exception &error) {
    fail_locked(Error(FDY_ERROR_MEMORY, "the arenas could not be set up: %s", error.what()));
  }
}

Placement placement_of(const Space &space, fdy_arena arena) {
  return {space.begin_of(arena), space.stride, arena == FDY_ARENA_HOST ? kHostAlignment : kAlignment};
}

void Arenas::make_arenas_locked() {
  std::vector<Arena> made;
  made.reserve(FDY_ARENA_COUNT);
  for (uint32_t i = 0; i < FDY_ARENA_COUNT; ++i) {
    const auto id = static_cast<fdy_arena>(i);
    const Extent behind = id == FDY_ARENA_HOST ? Extent{0, 0} : space_.reservations_of(id);
    Arena arena{id, placement_of(space_, id), Recorded(id), {}, 0, {}, {}, Reservations(behind), false};
    arena.recorded.set(layout_[i]);
    if (const uint64_t high = arena.recorded.high_water(arena.placement.span())) arena.placement.raise_floor(high);
    made.push_back(std::move(arena));
  }
  arenas_ = std::move(made);
}

bool Arenas::serves(CUdevice device) {
  std::lock_guard guard(lock_);
  if (state_ == State::unreserved) reserve_locked();
  if (state_ == State::ready && !backing_.bound()) {
    try {
      backing_.bind(device);
    } catch (const Error &error) {
      fail_locked(error);
    }
  }
  if (state_ == State::failed) {
    if (capturing()) throw *failure_;
    return false;  // said once in fail_locked, and again by divergence() and map_held()
  }
  return device == backing_.device();
}

uint64_t Arenas::allocate(fdy_arena which, uint64_t bytes, bool captured) {
  Arena &arena = arenas_[which];
  if (!captured) drain(arena);
  std::lock_guard guard(lock_);
  std::optional<Placement::Placed> placed;
  if (layout_space_) {
    if (const auto address = arena.recorded.follow(arena.made, bytes)) {
      placed = arena.placement.place_at(*address, bytes);
      if (!placed) {
        // The recording's engine mapped it itself, or somebody still lives there whom the recording had freed by now.
        const bool elsewhere = arena.reservations.zone().contains(*address);
        arena.recorded.diverge(elsewhere ? FDY_DIVERGENCE_ADDRESS : FDY_DIVERGENCE_LIFETIME, arena.made, bytes);
      }
    }
  }
  if (!placed) placed = arena.placement.place(bytes);
  if (placed->map) {
    try {
      backing_.map(*placed->map);
    } catch (...) {
      arena.placement.release(placed->address);
      throw;
    }
  }
  record_locked(arena, placed->address, bytes, captured);
  return placed->address;
}

void Arenas::record_locked(Arena &arena, uint64_t address, uint64_t bytes, bool captured) {
  const uint32_t ordinal = arena.made++;
  arena.live.insert_or_assign(address, Live{bytes, ordinal, ++serial_, false, captured});
  if (!recording_) return;
  arena.history.push_back({.address = address,
                           .bytes = bytes,
                           .arena = static_cast<uint32_t>(arena.id),
                           .ordinal = ordinal,
                           .live = 1,
                           .reserved = 0});
}

Arena *Arenas::arena_of_locked(uint64_t address) noexcept {
  if (state_ != State::ready) return nullptr;
  const uint32_t arena = space_.arena_of(address);
  return arena < FDY_ARENA_COUNT ? &arenas_[arena] : nullptr;
}

bool Arenas::contains(uint64_t address) const noexcept {
  return !forked_with_contexts() && state_.load(std::memory_order_acquire) == State::ready && space_.contains(address);
}

std::optional<std::pair<Place, uint64_t>> Arenas::find(uint64_t address) noexcept {
  if (!contains(address) && !reservable(address)) return std::nullopt;
  std::lock_guard guard(lock_);
  Arena *arena = arena_of_locked(address);
  if (!arena) return std::nullopt;
  auto at = arena->live.upper_bound(address);
  if (at == arena->live.begin()) return std::nullopt;
  --at;
  const Live &block = at->second;
  if (address - at->first >= block.bytes) return std::nullopt;
  return std::pair(Place{arena->id, block.ordinal, at->first, block.bytes, address - at->first}, block.serial);
}

bool Arenas::made_under_capture(uint64_t address) noexcept {
  std::lock_guard guard(lock_);
  Arena *arena = arena_of_locked(address);
  if (!arena) return false;
  auto at = arena->live.find(address);
  return at != arena->live.end() && at->second.captured;
}

void Arenas::note_freed_locked(Arena &arena, const Live &block) {
  if (block.ordinal < arena.history.size()) arena.history[block.ordinal].live = 0;
}

Arenas::Taken Arenas::take(uint64_t address, Arena *&arena) {
  std::lock_guard guard(lock_);
  arena = arena_of_locked(address);
  if (!arena) return Taken::unknown;
  auto at = arena->live.find(address);
  if (at == arena->live.end() || at->second.held) return Taken::unknown;
  // Every replay of its graph uses it again, whoever frees it between two of them.
  if (at->second.captured) return Taken::kept;
  note_freed_locked(*arena, at->second);
  if (held_mapped_) {
    const fdy_allocation *recorded = arena->recorded.at(at->second.ordinal);
    if (recorded && recorded->live && recorded->address == address) {
      at->second.held = true;  // restored graphs use it; divergence() tells
      return Taken::kept;
    }
  }
  arena->live.erase(at);
  return Taken::yes;
}

void Arenas::release_locked(Arena &arena, uint64_t address) {
  if (const auto extent = arena.placement.release(address)) backing_.unmap(*extent);
}

CUresult Arenas::free(uint64_t address) {
  Arena *arena = nullptr;
  switch (take(address, arena)) {
    case Taken::unknown:
      return CUDA_ERROR_INVALID_VALUE;
    case Taken::kept:
      return CUDA_SUCCESS;
    case Taken::yes:
      break;
  }
  if (captures::any()) {
    std::lock_guard guard(lock_);
    arena->pending.push_back({address, nullptr});
    return CUDA_SUCCESS;
  }
  const CUresult synchronised = FDY_CU_RESULT(cuCtxSynchronize);
  std::lock_guard guard(lock_);
  release_locked(*arena, address);
  return synchronised;
}

CUresult Arenas::free_ordered(uint64_t address, CUstream stream, bool per_thread, bool is_capturing) {
  if (is_capturing) return made_under_capture(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  CUevent event = nullptr;
  FDY_CU(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
  const CUresult recorded =
      per_thread ? FDY_CU_RESULT(cuEventRecord_ptsz, event, stream) : FDY_CU_RESULT(cuEventRecord, event, stream);
  Arena *arena = nullptr;
  const Taken taken = recorded == CUDA_SUCCESS ? take(address, arena) : Taken::unknown;
  if (taken == Taken::yes) {
    std::lock_guard guard(lock_);
    arena->pending.push_back({address, event});
    return CUDA_SUCCESS;
  }
  FDY_CU_RESULT(cuEventDestroy_v2, event);
  if (recorded != CUDA_SUCCESS) return recorded;
  return taken == Taken::kept ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Addresses must not depend on how fast the device is, so what was freed counts as free at the next allocation, and
// that allocation waits until it is.
void Arenas::drain(Arena &arena) {
  std::vector<PendingFree> pending;
  const bool may_synchronise = !captures::any();
  {
    std::lock_guard guard(lock_);
    if (arena.pending.empty()) return;
    auto later = std::stable_partition(arena.pending.begin(), arena.pending.end(),
                                       [&](const PendingFree &one) { return one.event || may_synchronise; });
    pending.assign(arena.pending.begin(), later);
    arena.pending.erase(arena.pending.begin(), later);
  }
  RelaxedCapture relaxed;
  bool synchronise = false;
  for (const PendingFree &one : pending) {
    if (!one.event) {
      synchronise = true;
      continue;
    }
    FDY_CU_RESULT(cuEventSynchronize, one.event);
    FDY_CU_RESULT(cuEventDestroy_v2, one.event);
  }
  const bool synchronised = !synchronise || FDY_CU_RESULT(cuCtxSynchronize) == CUDA_SUCCESS;
  std::lock_guard guard(lock_);
  for (const PendingFree &one : pending) {
    if (one.event || synchronised)
      release_locked(arena, one.address);
    else
      arena.pending.push_back(one);
  }
}

std::optional<Shared> Arenas::share(uint64_t address, uint64_t serial) {
  std::lock_guard guard(lock_);
  Arena *arena = space_.contains(address) ? arena_of_locked(address) : nullptr;
  if (!arena || arena->id == FDY_ARENA_HOST) return std::nullopt;
  const auto at = arena->live.find(address);
  if (at == arena->live.end() || at->second.serial != serial) return std::nullopt;
  const Mapped mapped = arena->placement.mapped_at(address);
  CUmemGenericAllocationHandle handle = 0;
  FDY_CU(cuMemRetainAllocationHandle, &handle, reinterpret_cast<void *>(mapped.extent.base));
  return Shared{Memory(handle), mapped};
}

Memory Arenas::create(uint64_t bytes) {
  std::lock_guard guard(lock_);
  return backing_.create(bytes);
}

Space Arenas::space() noexcept {
  std::lock_guard guard(lock_);
  return state_ == State::ready ? space_ : Space{0, space_.stride};
}

CUcontext Arenas::context() noexcept {
  return context_.load();
}

std::vector<fdy_allocation> Arenas::allocations() {
  refuse_after_fork();
  std::lock_guard guard(lock_);
  std::vector<fdy_allocation> out;
  for (const Arena &arena : arenas_) out.insert(out.end(), arena.history.begin(), arena.history.end());
  return out;
}

}  // namespace foundryd::memory
