// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>

#include "capture.h"
#include "context.h"
#include "pool.h"
#include "random.h"

namespace softcuda {

namespace {

// Large allocations start at a granule, small ones anywhere that is a multiple of 512 bytes, as on a device.
constexpr uint64_t kSmall = uint64_t{1} << 20;
constexpr uint64_t kSmallAlignment = 512;
constexpr uint64_t kPitch = 512;

}  // namespace

Range &Ranges::add(Range range) {
  range.buffer_id = process().next_id++;
  const uint64_t base = range.base;
  return ranges_.insert_or_assign(base, std::move(range)).first->second;
}

Range *Ranges::find(uint64_t address) {
  auto it = ranges_.upper_bound(address);
  if (it == ranges_.begin()) return nullptr;
  --it;
  return address - it->second.base < it->second.bytes ? &it->second : nullptr;
}

Range *Ranges::starting_at(uint64_t address) {
  const auto it = ranges_.find(address);
  return it == ranges_.end() ? nullptr : &it->second;
}

bool Ranges::overlaps(uint64_t address, uint64_t bytes) const {
  auto it = ranges_.lower_bound(address);
  if (it != ranges_.end() && it->second.base < address + bytes) return true;
  if (it == ranges_.begin()) return false;
  --it;
  return it->second.base + it->second.bytes > address;
}

bool Ranges::covers(uint64_t address, uint64_t bytes, bool write) {
  while (bytes > 0) {
    const Range *range = find(address);
    if (range == nullptr) return false;
    if (range->kind == Kind::Mapped) {
      const auto needed = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
      if ((range->access & needed) != needed) return false;
    }
    const uint64_t here = std::min(bytes, range->base + range->bytes - address);
    address += here;
    bytes -= here;
  }
  return true;
}

std::vector<Range> Ranges::of(const Context &context) const {
  std::vector<Range> out;
  for (const auto &[base, range] : ranges_) {
    if (range.context.lock().get() == &context) out.push_back(range);
  }
  return out;
}

Ranges &ranges() {
  alignas(Ranges) static std::byte storage[sizeof(Ranges)];
  static Ranges *const all = std::construct_at(reinterpret_cast<Ranges *>(storage));
  return *all;
}

std::map<uint64_t, std::shared_ptr<Allocation>> &allocations() {
  using Table = std::map<uint64_t, std::shared_ptr<Allocation>>;
  alignas(Table) static std::byte storage[sizeof(Table)];
  static Table *const all = std::construct_at(reinterpret_cast<Table *>(storage));
  return *all;
}

void charge(CUdevice ordinal, uint64_t bytes) {
  Device &device = device_at(ordinal);
  require(bytes <= process().settings.memory - device.memory_used, CUDA_ERROR_OUT_OF_MEMORY);
  device.memory_used += bytes;
}

void discharge(CUdevice ordinal, uint64_t bytes) {
  device_at(ordinal).memory_used -= bytes;
}

Allocation::Allocation(CUdevice on, uint64_t size) : bytes(size), device(on) {
  const bool small = size < kSmall;
  const uint64_t shift = small ? draw() % (kPage / kSmallAlignment) * kSmallAlignment : 0;
  mapping_bytes = round_up(size + shift, kPage);
  extent = std::make_shared<Extent>(on, mapping_bytes, false);
  mapping = place_anywhere(mapping_bytes, small ? kPage : kGranule);
  try {
    extent->map(mapping, mapping_bytes, PROT_READ | PROT_WRITE);
  } catch (const Failure &) {
    give_up(mapping, mapping_bytes);
    throw;
  }
  address = mapping + shift;
}

Allocation::~Allocation() {
  give_up(mapping, mapping_bytes);
}

Range Allocation::range(Kind kind, const std::shared_ptr<Context> &context) const {
  Range out;
  out.base = address;
  out.bytes = bytes;
  out.kind = kind;
  out.device = device;
  out.context = context;
  out.extent = extent;
  out.mapping = mapping;
  out.mapping_bytes = mapping_bytes;
  return out;
}

CUdeviceptr allocate(CUdevice device, uint64_t bytes, Kind kind, const std::shared_ptr<Context> &context) {
  require(bytes > 0);
  const uint64_t charged = round_up(bytes, kSmallAlignment);
  charge(device, charged);
  try {
    const auto allocation = std::make_shared<Allocation>(device, bytes);
    ranges().add(allocation->range(kind, context));
    allocations().emplace(allocation->address, allocation);
    ++counters().allocations;
    return allocation->address;
  } catch (...) {
    discharge(device, charged);
    throw;
  }
}

void deallocate(uint64_t address) {
  const auto it = allocations().find(address);
  require(it != allocations().end());
  discharge(it->second->device, round_up(it->second->bytes, kSmallAlignment));
  ranges().remove(address);
  allocations().erase(it);
}

void release_memory(const Context &context) {
  for (const Range &range : ranges().of(context)) {
    switch (range.kind) {
      case Kind::Plain:
      case Kind::Pool:
        // Memory of a graph is not in the table: it goes with the graph.
        if (allocations().count(range.base) != 0) deallocate(range.base);
        break;
      case Kind::HostAlloc:
      case Kind::Imported:
        give_up(range.mapping, range.mapping_bytes);
        ranges().remove(range.base);
        break;
      case Kind::Registered:
        ranges().remove(range.base);
        break;
      case Kind::Mapped:
      case Kind::Global:
        break;
    }
  }
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuMemGetInfo_v2(size_t *free, size_t *total) {
  return locked_call([&] {
    const auto context = current_context();
    const uint64_t memory = process().settings.memory;
    if (free != nullptr) *free = memory - device_at(context->device).memory_used;
    if (total != nullptr) *total = memory;
  });
}

SOFTCUDA_API cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
  return locked_call([&] {
    require(dptr != nullptr);
    const auto context = current_context();
    refuse_under_capture();
    *dptr = allocate(context->device, bytesize, Kind::Plain, context);
  });
}

SOFTCUDA_API cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                unsigned int ElementSizeBytes) {
  return locked_call([&] {
    require(dptr != nullptr && pPitch != nullptr && WidthInBytes > 0 && Height > 0);
    require(ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16);
    const auto context = current_context();
    refuse_under_capture();
    const uint64_t pitch = round_up(WidthInBytes, kPitch);
    *dptr = allocate(context->device, pitch * Height, Kind::Plain, context);
    *pPitch = pitch;
  });
}

SOFTCUDA_API cuMemFree_v2(CUdeviceptr dptr) {
  return call([&] {
    if (dptr == 0) return;
    std::vector<Mark> marks;
    {
      const Lock lock = lock_process();
      current_context();
      refuse_under_capture();
      const Range *range = ranges().starting_at(dptr);
      require(range != nullptr && (range->kind == Kind::Plain || range->kind == Kind::Pool));
      // Work that still uses the memory ends first.
      if (const auto context = range->context.lock(); context != nullptr && context->active) {
        marks = pending_work(*context);
      }
    }
    wait_all(marks);
    const Lock lock = lock_process();
    deallocate(dptr);
  });
}

SOFTCUDA_API cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr) {
  return locked_call([&] {
    current_context();
    const Range *range = ranges().find(dptr);
    require(range != nullptr, CUDA_ERROR_NOT_FOUND);
    if (pbase != nullptr) *pbase = range->base;
    if (psize != nullptr) *psize = range->bytes;
  });
}
