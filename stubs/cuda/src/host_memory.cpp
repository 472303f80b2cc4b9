// SPDX-License-Identifier: Apache-2.0
//
// Pinned host memory: allocated here, or the program's own and registered.
#include <sys/mman.h>

#include <cstring>

#include "capture.h"
#include "context.h"
#include "memory.h"

namespace softcuda {

namespace {

constexpr unsigned kAllocFlags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
constexpr unsigned kRegisterFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                                    CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;

void *allocate_host(size_t bytes, unsigned flags) {
  require(bytes > 0 && (flags & ~kAllocFlags) == 0);
  const auto context = current_context();
  refuse_under_capture();
  const uint64_t size = round_up(bytes, kPage);
  const uint64_t base = place_anywhere(size, kPage);
  if (mprotect(reinterpret_cast<void *>(base), size, PROT_READ | PROT_WRITE) != 0) {
    give_up(base, size);
    throw Failure{CUDA_ERROR_OUT_OF_MEMORY};
  }
  Range range;
  range.base = base;
  range.bytes = bytes;
  range.kind = Kind::HostAlloc;
  range.device = context->device;
  range.context = context;
  range.host_flags = flags | CU_MEMHOSTALLOC_DEVICEMAP;  // always so with unified addressing
  range.mapping = base;
  range.mapping_bytes = size;
  ranges().add(std::move(range));
  return reinterpret_cast<void *>(base);
}

// Every page of the range must exist.
bool resident(uint64_t base, uint64_t bytes) {
  std::vector<unsigned char> pages(bytes / kPage);
  return mincore(reinterpret_cast<void *>(base), bytes, pages.data()) == 0;
}

const Range &host_range(const void *p) {
  const Range *range = ranges().find(reinterpret_cast<uint64_t>(p));
  require(range != nullptr && range->host());
  return *range;
}

}  // namespace

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuMemAllocHost_v2(void **pp, size_t bytesize) {
  return locked_call([&] {
    require(pp != nullptr);
    *pp = allocate_host(bytesize, 0);
  });
}

SOFTCUDA_API cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags) {
  return locked_call([&] {
    require(pp != nullptr);
    *pp = allocate_host(bytesize, Flags);
  });
}

SOFTCUDA_API cuMemFreeHost(void *p) {
  return call([&] {
    if (p == nullptr) return;
    const auto address = reinterpret_cast<uint64_t>(p);
    std::vector<Mark> marks;
    {
      const Lock lock = lock_process();
      refuse_under_capture();
      const Range *range = ranges().starting_at(address);
      require(range != nullptr && range->kind == Kind::HostAlloc);
      if (const auto context = range->context.lock(); context != nullptr && context->active) {
        marks = pending_work(*context);
      }
    }
    wait_all(marks);
    const Lock lock = lock_process();
    const Range *range = ranges().starting_at(address);
    require(range != nullptr && range->kind == Kind::HostAlloc);
    give_up(range->mapping, range->mapping_bytes);
    ranges().remove(address);
  });
}

SOFTCUDA_API cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags) {
  return locked_call([&] {
    const auto context = current_context();
    refuse_under_capture();
    require(p != nullptr && bytesize > 0 && (Flags & ~kRegisterFlags) == 0);
    const auto base = reinterpret_cast<uint64_t>(p);
    const Range *there = ranges().find(base);
    require(there == nullptr || there->host());
    require(!ranges().overlaps(base, bytesize), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    const uint64_t first = base / kPage * kPage;
    require(resident(first, round_up(base + bytesize - first, kPage)));
    Range range;
    range.base = base;
    range.bytes = bytesize;
    range.kind = Kind::Registered;
    range.device = context->device;
    range.context = context;
    // Registered memory is always mapped and portable on a device with unified addressing.
    range.host_flags = Flags | CU_MEMHOSTREGISTER_DEVICEMAP;
    range.mapping = base;
    range.mapping_bytes = bytesize;
    ranges().add(std::move(range));
  });
}

SOFTCUDA_API cuMemHostUnregister(void *p) {
  return locked_call([&] {
    current_context();
    refuse_under_capture();
    const auto address = reinterpret_cast<uint64_t>(p);
    const Range *range = ranges().find(address);
    require(range != nullptr, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    require(range->kind == Kind::Registered && range->base == address);
    ranges().remove(range->base);
  });
}

SOFTCUDA_API cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags) {
  return locked_call([&] {
    require(pdptr != nullptr && Flags == 0);
    current_context();
    host_range(p);
    *pdptr = reinterpret_cast<CUdeviceptr>(p);
  });
}

SOFTCUDA_API cuMemHostGetFlags(unsigned int *pFlags, void *p) {
  return locked_call([&] {
    require(pFlags != nullptr);
    current_context();
    *pFlags = host_range(p).host_flags;
  });
}
