// SPDX-License-Identifier: Apache-2.0
//
// Overrides: contexts, and memory that is allocated and freed at once.
#include "interpose/concepts.h"
#include "memory/rows.h"

using namespace foundryd;
using namespace foundryd::memory;

namespace {

constexpr size_t kPitch = 512;

// The reservation is made as soon as there is a context, before anything else can settle at its addresses.
CUresult made(CUresult result, CUcontext *context) noexcept {
  if (result == CUDA_SUCCESS && context) Arenas::instance().context_made(*context);
  return result;
}

}  // namespace

FDY_OVERRIDE CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  const CUresult result = FDY_NEXT(cuDevicePrimaryCtxRetain, context, device);
  return overriding() ? made(result, context) : result;
}

FDY_OVERRIDE CUresult CUDAAPI cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
  const CUresult result = FDY_NEXT(cuCtxCreate_v2, context, flags, device);
  return overriding() ? made(result, context) : result;
}

FDY_OVERRIDE CUresult CUDAAPI cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinities, int count_of,
                                             unsigned int flags, CUdevice device) {
  const CUresult result = FDY_NEXT(cuCtxCreate_v3, context, affinities, count_of, flags, device);
  return overriding() ? made(result, context) : result;
}

FDY_OVERRIDE CUresult CUDAAPI cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags,
                                             CUdevice device) {
  const CUresult result = FDY_NEXT(cuCtxCreate_v4, context, parameters, flags, device);
  return overriding() ? made(result, context) : result;
}

FDY_OVERRIDE CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
  if (!overriding()) return FDY_NEXT(cuMemAlloc_v2, address, bytes);
  FDY_OWNER_OF_CALL();
  return guard_driver([&] {
    if (!address || bytes == 0) return FDY_NEXT(cuMemAlloc_v2, address, bytes);  // an error
    if (!for_arenas()) {
      const CUresult result = FDY_NEXT(cuMemAlloc_v2, address, bytes);
      return outside(result, *address, bytes);
    }
    *address = Arenas::instance().allocate(selected_arena(), bytes);
    return counted(CUDA_SUCCESS);
  });
}

FDY_OVERRIDE CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height,
                                                 unsigned int element_bytes) {
  if (!overriding()) return FDY_NEXT(cuMemAllocPitch_v2, address, pitch, width, height, element_bytes);
  FDY_OWNER_OF_CALL();
  return guard_driver([&] {
    const bool valid = address && pitch && width && height &&
                       (element_bytes == 4 || element_bytes == 8 || element_bytes == 16) &&
                       width <= SIZE_MAX - kPitch && round_up(width, kPitch) <= SIZE_MAX / height;
    // The driver says what is wrong with the rest.
    if (!valid || !for_arenas()) {
      const CUresult result = FDY_NEXT(cuMemAllocPitch_v2, address, pitch, width, height, element_bytes);
      return result == CUDA_SUCCESS ? outside(result, *address, *pitch * height) : result;
    }
    const size_t row = round_up(width, kPitch);
    *address = Arenas::instance().allocate(selected_arena(), row * height);
    *pitch = row;
    return counted(CUDA_SUCCESS);
  });
}

FDY_OVERRIDE CUresult CUDAAPI cuMemFree_v2(CUdeviceptr address) {
  if (!overriding()) return FDY_NEXT(cuMemFree_v2, address);
  return guard_driver([&] {
    if (Arenas::instance().contains(address)) return Arenas::instance().free(address);
    foreign::remove(address);
    return FDY_NEXT(cuMemFree_v2, address);
  });
}

FDY_OVERRIDE CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags) {
  if (!overriding()) return FDY_NEXT(cuMemAllocManaged, address, bytes, flags);
  FDY_OWNER_OF_CALL();
  return guard_driver([&] {
    const CUresult result = counted(FDY_NEXT(cuMemAllocManaged, address, bytes, flags));
    if (result == CUDA_SUCCESS) foreign::add(*address, bytes, foreign::Kind::managed);
    return result;
  });
}

namespace foundryd::memory {

std::span<const Row> device_rows() {
  static const Row table[] = {
      FDY_ROW("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain, 7000),
      FDY_ROW("cuCtxCreate", cuCtxCreate_v2, 3020),
      FDY_ROW("cuCtxCreate", cuCtxCreate_v3, 11040),
      FDY_ROW("cuCtxCreate", cuCtxCreate_v4, 12050),
      FDY_ROW("cuMemAlloc", cuMemAlloc_v2, 3020),
      FDY_ROW("cuMemAllocPitch", cuMemAllocPitch_v2, 3020),
      FDY_ROW("cuMemFree", cuMemFree_v2, 3020),
      FDY_ROW("cuMemAllocManaged", cuMemAllocManaged, 6000),
  };
  return table;
}

}  // namespace foundryd::memory
