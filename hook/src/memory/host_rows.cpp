// SPDX-License-Identifier: Apache-2.0
//
// Overrides: pinned host memory.  Nodes refer to it as they do to device memory, so it needs the same addresses: all of
// it comes from the host arena.
#include "interpose/concepts.h"
#include "memory/rows.h"

using namespace foundryd;
using namespace foundryd::memory;

namespace {

template <class Real>
CUresult allocate(void **address, size_t bytes, Real &&real) {
  return guard_driver([&] {
    if (!address || bytes == 0) return counted(real());
    if (!for_arenas()) {
      const CUresult result = real();
      return outside(result, reinterpret_cast<uint64_t>(*address), bytes);
    }
    *address = reinterpret_cast<void *>(Arenas::instance().allocate(FDY_ARENA_HOST, bytes));
    return counted(CUDA_SUCCESS);
  });
}

}  // namespace

FDY_OVERRIDE CUresult CUDAAPI cuMemHostAlloc(void **address, size_t bytes, unsigned int flags) {
  const auto real = [&] { return FDY_NEXT(cuMemHostAlloc, address, bytes, flags); };
  // Flags the driver does not know, it refuses.  Write-combining is a hint that registered memory does not have.
  constexpr unsigned int kKnown = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
  if (!overriding() || (flags & ~kKnown)) return real();
  FDY_OWNER_OF_CALL();
  return allocate(address, bytes, real);
}

FDY_OVERRIDE CUresult CUDAAPI cuMemAllocHost_v2(void **address, size_t bytes) {
  const auto real = [&] { return FDY_NEXT(cuMemAllocHost_v2, address, bytes); };
  if (!overriding()) return real();
  FDY_OWNER_OF_CALL();
  return allocate(address, bytes, real);
}

FDY_OVERRIDE CUresult CUDAAPI cuMemFreeHost(void *address) {
  if (!overriding()) return FDY_NEXT(cuMemFreeHost, address);
  return guard_driver([&] {
    const auto at = reinterpret_cast<uint64_t>(address);
    if (Arenas::instance().contains(at)) return Arenas::instance().free(at);
    foreign::remove(at);
    return FDY_NEXT(cuMemFreeHost, address);
  });
}

FDY_OVERRIDE CUresult CUDAAPI cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags) {
  const CUresult result = FDY_NEXT(cuMemHostRegister_v2, address, bytes, flags);
  if (!overriding() || !capturing() || result != CUDA_SUCCESS) return result;
  return guard_driver([&] {
    foreign::add(reinterpret_cast<uint64_t>(address), bytes, foreign::Kind::registered);
    return result;
  });
}

FDY_OVERRIDE CUresult CUDAAPI cuMemHostUnregister(void *address) {
  if (overriding()) foreign::remove(reinterpret_cast<uint64_t>(address));
  return FDY_NEXT(cuMemHostUnregister, address);
}

namespace foundryd::memory {

std::span<const Row> host_rows() {
  static const Row table[] = {
      FDY_ROW("cuMemHostAlloc", cuMemHostAlloc, 2020),
      FDY_ROW("cuMemAllocHost", cuMemAllocHost_v2, 3020),
      FDY_ROW("cuMemFreeHost", cuMemFreeHost, 2000),
      FDY_ROW("cuMemHostRegister", cuMemHostRegister_v2, 6050),
      FDY_ROW("cuMemHostUnregister", cuMemHostUnregister, 4000),
  };
  return table;
}

}  // namespace foundryd::memory
