// SPDX-License-Identifier: Apache-2.0
//
// Virtual memory management: reservations, memory handles, mappings, sharing by descriptor.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "capture.h"
#include "context.h"
#include "memory.h"
#include "random.h"

namespace softcuda {

std::pair<uint64_t, uint64_t> reservation_around(uint64_t address);

namespace {

// A memory handle.  It can be released while mappings still hold the extent.
struct Memory {
  CUmemAllocationProp properties{};
  std::shared_ptr<Extent> extent;
  uint64_t references = 0;
  uint64_t mappings = 0;
  bool charged = false;
};

struct Tables {
  std::map<CUmemGenericAllocationHandle, Memory> memory;
  std::map<uint64_t, uint64_t> reservations;  // bytes by base
  std::map<uint64_t, uint64_t> by_me;         // those of them that lie in kByMe
  uint64_t by_me_bytes = 0;
};

// Address space that a driver has by it: small reservations come from there while it lasts, wherever they are wished.
// An H200 gave 16 MiB elsewhere, and 16 more at the place that it had just been asked for.
constexpr uint64_t kByMe = uint64_t{30} << 20;

Tables &tables() {
  alignas(Tables) static std::byte storage[sizeof(Tables)];
  static Tables *const all = std::construct_at(reinterpret_cast<Tables *>(storage));
  return *all;
}

Memory &memory_at(CUmemGenericAllocationHandle handle) {
  const auto it = tables().memory.find(handle);
  require(it != tables().memory.end());
  return it->second;
}

CUmemGenericAllocationHandle new_handle() {
  for (;;) {
    const CUmemGenericAllocationHandle handle = draw() >> 16 | 1;
    if (tables().memory.count(handle) == 0) return handle;
  }
}

// The handle goes when nothing refers to it any more: neither the program nor a mapping.
void drop_if_unused(CUmemGenericAllocationHandle handle) {
  const auto it = tables().memory.find(handle);
  if (it == tables().memory.end() || it->second.references > 0 || it->second.mappings > 0) return;
  if (it->second.charged) discharge(it->second.extent->device(), it->second.extent->bytes());
  tables().memory.erase(it);
}

void check_properties(const CUmemAllocationProp *properties) {
  require(properties != nullptr);
  require(properties->type == CU_MEM_ALLOCATION_TYPE_PINNED);
  require(properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_NOT_SUPPORTED);
  device_at(properties->location.id);
  const int handles = properties->requestedHandleTypes;
  require((handles & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0, CUDA_ERROR_NOT_SUPPORTED);
}

bool within_reservation(uint64_t address, uint64_t bytes) {
  const auto [base, size] = reservation_around(address);
  return size > 0 && address + bytes <= base + size && address + bytes > address;
}

bool served_by_me(uint64_t bytes) {
  return bytes <= kByMe - tables().by_me_bytes;
}

bool aligned(uint64_t address, uint64_t bytes) {
  return bytes > 0 && address % kGranule == 0 && bytes % kGranule == 0;
}

// The mappings that make up a range exactly; fails if one sticks out or there is a gap.
std::vector<Range *> mappings_in(uint64_t address, uint64_t bytes) {
  std::vector<Range *> out;
  for (uint64_t at = address; at < address + bytes;) {
    Range *range = ranges().starting_at(at);
    require(range != nullptr && range->kind == Kind::Mapped && range->base + range->bytes <= address + bytes);
    out.push_back(range);
    at += range->bytes;
  }
  return out;
}

int protection_of(CUmemAccess_flags flags) {
  switch (flags) {
    case CU_MEM_ACCESS_FLAGS_PROT_NONE:
      return PROT_NONE;
    case CU_MEM_ACCESS_FLAGS_PROT_READ:
      return PROT_READ;
    case CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
      return PROT_READ | PROT_WRITE;
    default:
      throw Failure{CUDA_ERROR_INVALID_VALUE};
  }
}

}  // namespace

// For cuPointerGetAttribute.
std::pair<uint64_t, uint64_t> reservation_around(uint64_t address) {
  auto it = tables().reservations.upper_bound(address);
  if (it == tables().reservations.begin()) return {0, 0};
  --it;
  return address - it->first < it->second ? std::pair<uint64_t, uint64_t>(*it) : std::pair<uint64_t, uint64_t>{0, 0};
}

int allowed_handle_types(CUmemGenericAllocationHandle handle) {
  const auto it = tables().memory.find(handle);
  return it == tables().memory.end() ? 0 : it->second.properties.requestedHandleTypes;
}

bool rdma_capable(CUmemGenericAllocationHandle handle) {
  const auto it = tables().memory.find(handle);
  return it != tables().memory.end() && it->second.properties.allocFlags.gpuDirectRDMACapable != 0;
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                           CUmemAllocationGranularity_flags option) {
  return locked_call([&] {
    require(granularity != nullptr);
    require(option == CU_MEM_ALLOC_GRANULARITY_MINIMUM || option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    check_properties(prop);
    *granularity = kGranule;
  });
}

SOFTCUDA_API cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                 unsigned long long flags) {
  return locked_call([&] {
    require(ptr != nullptr && flags == 0 && size > 0 && size % kGranule == 0);
    require((alignment & (alignment - 1)) == 0);
    const uint64_t unit = std::max<uint64_t>(alignment, kGranule);
    require(addr % kGranule == 0);
    // The address is a wish: a taken one gives another place, not an error.
    uint64_t base = addr;
    const bool by_me = served_by_me(size);
    if (by_me || base == 0 || base % unit != 0 || !place_at(base, size)) base = place_anywhere(size, unit);
    tables().reservations.emplace(base, size);
    if (by_me) {
      tables().by_me.emplace(base, size);
      tables().by_me_bytes += size;
    }
    *ptr = base;
  });
}

SOFTCUDA_API cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  return locked_call([&] {
    const auto it = tables().reservations.find(ptr);
    require(it != tables().reservations.end() && it->second == size);
    require(!ranges().overlaps(ptr, size));
    give_up(ptr, size);
    tables().reservations.erase(it);
    if (tables().by_me.erase(ptr) > 0) tables().by_me_bytes -= size;
  });
}

SOFTCUDA_API cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                         unsigned long long flags) {
  return locked_call([&] {
    require(handle != nullptr && flags == 0 && size > 0 && size % kGranule == 0);
    check_properties(prop);
    const CUdevice device = prop->location.id;
    charge(device, size);
    Memory memory;
    memory.properties = *prop;
    memory.references = 1;
    memory.charged = true;
    try {
      memory.extent = std::make_shared<Extent>(device, size, prop->requestedHandleTypes != 0);
    } catch (...) {
      discharge(device, size);
      throw;
    }
    *handle = new_handle();
    tables().memory.emplace(*handle, std::move(memory));
    ++counters().allocations;
  });
}

SOFTCUDA_API cuMemRelease(CUmemGenericAllocationHandle handle) {
  return locked_call([&] {
    Memory &memory = memory_at(handle);
    require(memory.references > 0);
    --memory.references;
    drop_if_unused(handle);
  });
}

SOFTCUDA_API cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) {
  return locked_call([&] {
    Memory &memory = memory_at(handle);
    // Memory is mapped whole, and that is looked at before all else.
    require(size == memory.extent->bytes(), CUDA_ERROR_NOT_SUPPORTED);
    require(memory.references > 0 && flags == 0 && offset == 0 && aligned(ptr, size));
    require(within_reservation(ptr, size));
    require(!ranges().overlaps(ptr, size));
    memory.extent->map(ptr, size, PROT_NONE);
    Range range;
    range.base = ptr;
    range.bytes = size;
    range.kind = Kind::Mapped;
    range.device = memory.extent->device();
    range.extent = memory.extent;
    range.mapping = ptr;
    range.mapping_bytes = size;
    range.handle = handle;
    range.access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    ranges().add(std::move(range));
    ++memory.mappings;
  });
}

SOFTCUDA_API cuMemUnmap(CUdeviceptr ptr, size_t size) {
  return locked_call([&] {
    require(aligned(ptr, size));
    if (!ranges().overlaps(ptr, size)) return require(within_reservation(ptr, size));  // nothing there to unmap
    const auto mapped = mappings_in(ptr, size);
    blank(ptr, size);
    for (const Range *range : mapped) {
      const auto handle = range->handle;
      ranges().remove(range->base);
      --memory_at(handle).mappings;
      drop_if_unused(handle);
    }
  });
}

SOFTCUDA_API cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
  return locked_call([&] {
    require(aligned(ptr, size) && desc != nullptr && count > 0);
    const auto mapped = mappings_in(ptr, size);
    // The process is one address space: the widest access that any device gets is what every device gets.
    int widest = 0;
    for (size_t i = 0; i < count; ++i) {
      protection_of(desc[i].flags);
      if (desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        device_at(desc[i].location.id);
        widest |= desc[i].flags;
      } else {
        require(desc[i].location.type == CU_MEM_LOCATION_TYPE_HOST ||
                desc[i].location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA);
      }
    }
    const auto flags = static_cast<CUmemAccess_flags>(widest);
    require(mprotect(reinterpret_cast<void *>(ptr), size, protection_of(flags)) == 0, CUDA_ERROR_OPERATING_SYSTEM);
    for (Range *range : mapped) range->access = flags;
  });
}

SOFTCUDA_API cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr) {
  return locked_call([&] {
    require(flags != nullptr && location != nullptr && location->type == CU_MEM_LOCATION_TYPE_DEVICE);
    device_at(location->id);
    const Range *range = ranges().find(ptr);
    require(range != nullptr);
    *flags = range->access;
  });
}

SOFTCUDA_API cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                          CUmemAllocationHandleType handleType, unsigned long long flags) {
  return locked_call([&] {
    require(shareableHandle != nullptr && flags == 0);
    const Memory &memory = memory_at(handle);
    require(handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    require((memory.properties.requestedHandleTypes & handleType) != 0);
    const int descriptor = memory.extent->export_descriptor();
    std::memcpy(shareableHandle, &descriptor, sizeof descriptor);
  });
}

SOFTCUDA_API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                            CUmemAllocationHandleType shHandleType) {
  return locked_call([&] {
    require(handle != nullptr);
    require(shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    Memory memory;
    memory.extent = Extent::import_descriptor(static_cast<int>(reinterpret_cast<intptr_t>(osHandle)));
    require(static_cast<size_t>(memory.extent->device()) < process().devices.size(), CUDA_ERROR_INVALID_DEVICE);
    memory.properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;  // and no handle types: those are the exporter's
    memory.properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, memory.extent->device()};
    memory.references = 1;
    *handle = new_handle();
    tables().memory.emplace(*handle, std::move(memory));
  });
}

SOFTCUDA_API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
  return locked_call([&] {
    require(prop != nullptr);
    *prop = memory_at(handle).properties;
  });
}

SOFTCUDA_API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr) {
  return locked_call([&] {
    require(handle != nullptr);
    const Range *range = ranges().find(reinterpret_cast<uint64_t>(addr));
    require(range != nullptr && range->kind == Kind::Mapped);
    ++memory_at(range->handle).references;
    *handle = range->handle;
  });
}
