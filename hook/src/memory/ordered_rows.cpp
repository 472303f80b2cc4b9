// SPDX-License-Identifier: Apache-2.0
//
// Overrides: stream-ordered memory.  Under capture it comes from the graph arena and leaves no node, so that the graph
// has only nodes that can be built again; outside, from the selected arena while recording.
#include "interpose/concepts.h"
#include "memory/rows.h"

using namespace foundryd;
using namespace foundryd::memory;

namespace {

// Each override exists twice: stream 0 is the legacy stream or the thread's own.
enum class Zero : bool { legacy, per_thread };

bool stream_captures(CUstream stream, Zero zero) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = zero == Zero::per_thread ? FDY_CU_RESULT(cuStreamIsCapturing_ptsz, stream, &status)
                                                   : FDY_CU_RESULT(cuStreamIsCapturing, stream, &status);
  driver::check(result, "cuStreamIsCapturing");
  if (status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
    throw Error::driver(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "cuStreamIsCapturing");
  return status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

// The session's device is the one that counts, and the stream's context says it better than the thread's current one
// does; they are the same in any program that this could serve.
template <class Real>
CUresult allocate(CUdeviceptr *address, size_t bytes, CUstream stream, Zero zero, Real &&real) {
  return guard_driver([&] {
    if (!address || bytes == 0) return counted(real());
    if (!for_arenas()) {
      const CUresult result = real();
      return outside(result, *address, bytes);
    }
    const bool captured = stream_captures(stream, zero);
    const fdy_arena arena = captured ? FDY_ARENA_GRAPH : selected_arena();
    // A restored engine's scratch memory concerns no graph, and the driver's pool is faster than we are.
    if (!captured && restoring() && arena == FDY_ARENA_DEFAULT) return counted(real());
    *address = Arenas::instance().allocate(arena, bytes, captured);
    return counted(CUDA_SUCCESS);
  });
}

template <class Real>
CUresult release(CUdeviceptr address, CUstream stream, Zero zero, Real &&real) {
  return guard_driver([&] {
    if (!Arenas::instance().contains(address)) {
      foreign::remove(address);
      return real();
    }
    return Arenas::instance().free_ordered(address, stream, zero == Zero::per_thread, stream_captures(stream, zero));
  });
}

}  // namespace

FDY_OVERRIDE CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
  const auto real = [&] { return FDY_NEXT(cuMemAllocAsync, address, bytes, stream); };
  if (!overriding()) return real();
  FDY_OWNER_OF_CALL();
  return allocate(address, bytes, stream, Zero::legacy, real);
}

FDY_OVERRIDE CUresult CUDAAPI cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream) {
  const auto real = [&] { return FDY_NEXT(cuMemAllocAsync_ptsz, address, bytes, stream); };
  if (!overriding()) return real();
  FDY_OWNER_OF_CALL();
  return allocate(address, bytes, stream, Zero::per_thread, real);
}

FDY_OVERRIDE CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool,
                                                      CUstream stream) {
  const auto real = [&] { return FDY_NEXT(cuMemAllocFromPoolAsync, address, bytes, pool, stream); };
  if (!overriding()) return real();
  FDY_OWNER_OF_CALL();
  return allocate(address, bytes, stream, Zero::legacy, real);
}

FDY_OVERRIDE CUresult CUDAAPI cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t bytes, CUmemoryPool pool,
                                                           CUstream stream) {
  const auto real = [&] { return FDY_NEXT(cuMemAllocFromPoolAsync_ptsz, address, bytes, pool, stream); };
  if (!overriding()) return real();
  FDY_OWNER_OF_CALL();
  return allocate(address, bytes, stream, Zero::per_thread, real);
}

FDY_OVERRIDE CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  const auto real = [&] { return FDY_NEXT(cuMemFreeAsync, address, stream); };
  return overriding() ? release(address, stream, Zero::legacy, real) : real();
}

FDY_OVERRIDE CUresult CUDAAPI cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) {
  const auto real = [&] { return FDY_NEXT(cuMemFreeAsync_ptsz, address, stream); };
  return overriding() ? release(address, stream, Zero::per_thread, real) : real();
}

namespace foundryd::memory {

std::span<const Row> ordered_rows() {
  static const Row table[] = {
      FDY_ROW_LEGACY_STREAM("cuMemAllocAsync", cuMemAllocAsync, 11020),
      FDY_ROW_PER_THREAD_STREAM("cuMemAllocAsync", cuMemAllocAsync_ptsz, 11020),
      FDY_ROW_LEGACY_STREAM("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync, 11020),
      FDY_ROW_PER_THREAD_STREAM("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync_ptsz, 11020),
      FDY_ROW_LEGACY_STREAM("cuMemFreeAsync", cuMemFreeAsync, 11020),
      FDY_ROW_PER_THREAD_STREAM("cuMemFreeAsync", cuMemFreeAsync_ptsz, 11020),
  };
  return table;
}

}  // namespace foundryd::memory
