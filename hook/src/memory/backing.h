// SPDX-License-Identifier: Apache-2.0
//
// What lies behind the arenas' addresses: one reservation of device address space, the host arena's range behind it,
// and memory mapped into both.
#ifndef FOUNDRYD_HOOK_MEMORY_BACKING_H
#define FOUNDRYD_HOOK_MEMORY_BACKING_H

#include <cstdint>
#include <utility>

#include "foundryd/records.h"
#include "memory/placement.h"
#include "support/cuda.h"

namespace foundryd::memory {

// Where the arenas lie: arena a at base + a * stride.
struct Space {
  uint64_t base = 0x600000000000;
  uint64_t stride = 256ull << 30;

  uint64_t begin_of(uint32_t arena) const { return base + arena * stride; }
  uint64_t device_bytes() const;  // of the arenas of device memory
  uint64_t bytes() const;         // of all
  bool contains(uint64_t address) const { return address >= base && address - base < bytes(); }

  // Where an engine's own reservations lie that it makes with arena `arena` selected, one of device memory.  As much of
  // it as programs can have addresses: possibly nothing.
  Extent reservations_of(uint32_t arena) const;
  // The arena of an address, its reservations included; FDY_ARENA_COUNT if there is none.
  uint32_t arena_of(uint64_t address) const;
};

// FOUNDRYD_ARENA_BASE and FOUNDRYD_ARENA_STRIDE, or the defaults.  Throws Error for values that cannot be.
Space space_from_environment();
// Throws Error if arenas cannot lie there.
void check_space(const Space &space);

// A handle of device memory.  What is mapped stays after it.
class Memory {
 public:
  explicit Memory(CUmemGenericAllocationHandle handle) : handle_(handle) {}
  ~Memory();
  Memory(Memory &&other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Memory &operator=(Memory &&) = delete;
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_;
};

// Where address space came out, if it did; what came out elsewhere is given back already.
struct Reservation {
  CUresult result;
  CUdeviceptr address;
};

// Reserves at this very place, if that is free.  The driver serves small reservations from space that it has by it,
// wherever they are wished, so it is asked again while it does.
Reservation reserve_exactly(Extent extent, uint64_t alignment = 0);

// Maps memory into reserved space, for `device` to read and write.  Leaves nothing behind if it throws.
void map_memory(Extent extent, const Memory &memory, CUdevice device);

class Backing {
 public:
  // Reserves exactly `space`.  Throws Error, and reserves nothing, if it does not come out there.
  void reserve(const Space &space);

  // Device memory is of this device from now on.  Throws Error if the device cannot back the arenas.
  void bind(CUdevice device);
  bool bound() const { return device_ >= 0; }
  CUdevice device() const { return device_; }

  // Takes address space behind the arenas, at this very place.  Throws Error if it does not come out there.
  void reserve_at(Extent extent);

  // Memory of the arenas' own kind, not mapped anywhere.
  Memory create(uint64_t bytes) const;
  // Whole granules.  `map` leaves nothing behind if it throws.
  void map(Extent extent);
  void unmap(Extent extent);

 private:
  bool on_host(Extent extent) const { return space_.arena_of(extent.base) == FDY_ARENA_HOST; }
  void map_device(Extent extent);
  void map_host(Extent extent);

  Space space_{};
  CUdevice device_ = -1;
  CUmemAllocationProp properties_{};
};

// Mapping and freeing are harmless to a capture, but the driver cannot know: it judges by the thread's mode.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept;
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture &) = delete;
  RelaxedCapture &operator=(const RelaxedCapture &) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged_;
};

}  // namespace foundryd::memory

#endif  // FOUNDRYD_HOOK_MEMORY_BACKING_H
