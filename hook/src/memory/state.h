// SPDX-License-Identifier: Apache-2.0
//
// The arenas of this process: shared by all threads, under one lock that is never held while waiting for the device.
#ifndef FOUNDRYD_HOOK_MEMORY_STATE_H
#define FOUNDRYD_HOOK_MEMORY_STATE_H

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "foundryd/hook.h"
#include "memory/arenas.h"
#include "memory/backing.h"
#include "memory/placement.h"
#include "memory/recorded.h"
#include "memory/reservations.h"
#include "support/error.h"

namespace foundryd::memory {

struct Live {
  uint64_t bytes;  // as requested
  uint32_t ordinal;
  uint64_t serial;        // unique in the process
  bool held = false;      // kept for the graphs; the program does not know of it, or has freed it
  bool captured = false;  // made under stream capture: the graph touches it for as long as it lives
};

// Freed by the program, still in use by the device until the event, or until the context can be synchronised.
struct PendingFree {
  uint64_t address;
  CUevent event;  // nullptr: freed while a capture ran
};

struct Arena {
  fdy_arena id;
  Placement placement;
  Recorded recorded;
  std::vector<fdy_allocation> history;  // by ordinal
  uint32_t made = 0;
  std::map<uint64_t, Live> live;
  std::vector<PendingFree> pending;
  Reservations reservations;
  bool zone_kept = false;  // the reservations' zone is this process's, for good
};

// Memory behind an allocation, with what else is mapped by the same handle.
struct Shared {
  Memory memory;
  Mapped mapped;
};

// Empty, in its part of the space.
Placement placement_of(const Space &space, fdy_arena arena);

class Arenas {
 public:
  static Arenas &instance();
  // Throws Error in a forked child of a process that used CUDA.
  static void refuse_after_fork();

  // --- from overrides ---
  // At each new context: the reservation is made at the first.
  void context_made(CUcontext context) noexcept;
  // Whether allocations on `device` are served here; if not, the driver must.  Throws Error in capture mode if the
  // arenas do not lie where they must: an address elsewhere would end up in the archive.
  bool serves(CUdevice device);
  uint64_t allocate(fdy_arena arena, uint64_t bytes, bool captured = false);
  // Waits for the device, as cuMemFree does.
  CUresult free(uint64_t address);
  // Ordered behind what `stream` has so far.  `capturing`: the stream is.
  CUresult free_ordered(uint64_t address, CUstream stream, bool per_thread, bool capturing);
  bool contains(uint64_t address) const noexcept;
  // The live allocation or held range around an address.
  std::optional<std::pair<Place, uint64_t>> find(uint64_t address) noexcept;  // with its serial
  bool made_under_capture(uint64_t address) noexcept;

  // --- for other processes, and for a second place in this one ---
  // The memory behind a live allocation of device memory; nothing if it is not the one that had this serial.
  std::optional<Shared> share(uint64_t address, uint64_t serial);
  // Fresh memory of the arenas' kind.
  Memory create(uint64_t bytes);
  // --- from overrides of virtual memory management (engine_memory.cpp) ---
  // Whether address space that the calling thread reserves is an arena's.  Throws Error in capture mode if it must be
  // and cannot.
  bool serves_reservations();
  // Address space behind `arena`, at a place of the arena's sequence.  Throws Error.
  uint64_t reserve(fdy_arena arena, uint64_t bytes, uint64_t alignment);
  // Gives such a place back, as cuMemAddressFree does: whole, and with nothing mapped.
  CUresult unreserve(uint64_t address, uint64_t bytes);
  // Whether the address lies where only `reserve` gives space.
  bool reservable(uint64_t address) const noexcept;
  // Whether what lies around it is all `reserve`'s to give: the driver does not know who may map there.
  bool keeps_space_around(uint64_t address) noexcept;
  // The space around it that `reserve` gave.
  std::optional<Extent> reservation(uint64_t address) noexcept;
  // After the driver did it to reserved space.  `unmapped` forgets every piece that it touches.
  void mapped(uint64_t address, uint64_t bytes);
  void unmapped(uint64_t address, uint64_t bytes);
  // Held while reserved space changes and until the change is recorded.
  std::mutex &reserved_space() { return reserved_space_; }

  // --- from the table ---
  Space space() noexcept;  // base 0 before the reservation
  std::vector<fdy_allocation> allocations();
  void set_layout(const fdy_layout &layout);
  fdy_divergence divergence();
  void map_held();
  void release_held();
  // The first context of the process, for threads that have none.
  CUcontext context() noexcept;

 private:
  enum class State : uint8_t { unreserved, ready, failed };
  enum class Taken : uint8_t { unknown, kept, yes };

  Arenas() = default;
  static void after_fork_in_child();
  void reserve_locked() noexcept;
  void keep_reservations_locked();
  void keep_zone_locked(Arena &arena);
  void make_arenas_locked();
  void fail_locked(const Error &error) noexcept;
  void drain(Arena &arena);
  Taken take(uint64_t address, Arena *&arena);
  void record_locked(Arena &arena, uint64_t address, uint64_t bytes, bool captured);
  void forget_pieces_locked(Arena &arena, Extent extent);
  void release_held_locked(Arena &arena, uint64_t address, uint64_t bytes);
  void note_freed_locked(Arena &arena, const Live &block);
  void release_locked(Arena &arena, uint64_t address);
  Arena *arena_of_locked(uint64_t address) noexcept;
  void require_layout_locked();
  void map_recorded_locked(Arena &arena, std::vector<std::pair<Arena *, fdy_allocation>> &mapped);

  std::mutex reserved_space_;  // before lock_
  std::mutex lock_;
  std::atomic<State> state_{State::unreserved};
  std::optional<Error> failure_;
  std::atomic<CUcontext> context_{nullptr};
  Space space_{};
  Backing backing_;
  std::vector<Arena> arenas_;  // by fdy_arena, once reserved
  std::optional<Space> layout_space_;
  std::array<std::vector<fdy_allocation>, FDY_ARENA_COUNT> layout_;
  bool held_mapped_ = false;
  bool recording_ = true;
  uint64_t serial_ = 0;
};

// The calling thread's choice for device memory.
fdy_arena selected_arena() noexcept;

// Makes a context current while it lives, if the thread has none.
class CurrentContext {
 public:
  CurrentContext();
  ~CurrentContext();
  CurrentContext(const CurrentContext &) = delete;
  CurrentContext &operator=(const CurrentContext &) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace foundryd::memory

#endif  // FOUNDRYD_HOOK_MEMORY_STATE_H
