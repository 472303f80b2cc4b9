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
    if (!address || bytes == 0 || !for_arenas()) return counted(real());
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
    return Arenas::instance().contains(at) ? Arenas::instance().free(at) : FDY_NEXT(cuMemFreeHost, address);
  });
}

namespace foundryd::memory {

std::span<const Row> host_rows() {
  static const Row table[] = {
      FDY_ROW("cuMemHostAlloc", cuMemHostAlloc, 2020),
      FDY_ROW("cuMemAllocHost", cuMemAllocHost_v2, 3020),
      FDY_ROW("cuMemFreeHost", cuMemFreeHost, 2000),
  };
  return table;
}

}  // namespace foundryd::memory
