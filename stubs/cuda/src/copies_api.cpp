// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "capture.h"
#include "context.h"
#include "copies.h"
#include "memory.h"

namespace softcuda {

namespace {

constexpr auto kHost = CU_MEMORYTYPE_HOST;
constexpr auto kDevice = CU_MEMORYTYPE_DEVICE;
constexpr auto kUnified = CU_MEMORYTYPE_UNIFIED;

uint64_t at(const void *pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

// Host memory that the driver pinned or was told of; any other is read when the call is made.
bool pinned(const CUDA_MEMCPY3D &copy) {
  const Range *range = ranges().find(at(copy.srcHost));
  return range != nullptr;
}

// Waits for what was just submitted, without the lock.
void finish(Lock &lock, const Mark &mark, const std::shared_ptr<Fault> &fault) {
  lock.unlock();
  mark.wait();
  require(fault->load() == CUDA_SUCCESS, fault->load());
}

// A capture minds synchronous copies and fills only where the null stream would have to wait for it.
void copy_now(const CUDA_MEMCPY3D &copy) {
  Lock lock = lock_process();
  const auto context = current_context();
  const auto stream = default_stream();
  refuse_capturing(*stream);
  check_copy(copy);
  const Mark mark = enqueue(*stream, [copy] { run_copy(copy); });
  finish(lock, mark, context->fault);
}

void copy_later(const CUDA_MEMCPY3D &copy, CUstream handle) {
  Lock lock = lock_process();
  const auto stream = resolve_stream(handle);
  const auto context = stream->context.lock();
  if (capturing(*stream)) {
    check_copy(copy);
    if (empty(copy)) return;  // nothing to do is no node
    capture_work(*stream, CopyWork{copy, Handles<Context, CUcontext>::handle(context)});
    return;
  }
  check_copy(copy);
  const bool flat = copy.Height == 1 && copy.Depth == 1 && copy.srcXInBytes == 0;
  if (copy.srcMemoryType == kHost && flat && copy.WidthInBytes > 0 && !pinned(copy)) {
    const auto *from = static_cast<const std::byte *>(copy.srcHost);
    const auto staged = std::make_shared<std::vector<std::byte>>(from, from + copy.WidthInBytes);
    CUDA_MEMCPY3D rest = copy;
    rest.srcHost = staged->data();
    enqueue(*stream, [rest, staged] { run_copy(rest); });
    return;
  }
  const Mark mark = enqueue(*stream, [copy] { run_copy(copy); });
  const bool pageable = copy.dstMemoryType == kHost && ranges().find(at(copy.dstHost)) == nullptr;
  // The driver has nowhere to leave the bytes but the program's own memory, and waits.
  if (pageable) finish(lock, mark, context->fault);
}

CUDA_MEMCPY3D from_2d(const CUDA_MEMCPY2D &flat) {
  CUDA_MEMCPY3D copy{};
  copy.srcXInBytes = flat.srcXInBytes;
  copy.srcY = flat.srcY;
  copy.srcMemoryType = flat.srcMemoryType;
  copy.srcHost = flat.srcHost;
  copy.srcDevice = flat.srcDevice;
  copy.srcArray = flat.srcArray;
  copy.srcPitch = flat.srcPitch;
  copy.dstXInBytes = flat.dstXInBytes;
  copy.dstY = flat.dstY;
  copy.dstMemoryType = flat.dstMemoryType;
  copy.dstHost = flat.dstHost;
  copy.dstDevice = flat.dstDevice;
  copy.dstArray = flat.dstArray;
  copy.dstPitch = flat.dstPitch;
  copy.WidthInBytes = flat.WidthInBytes;
  copy.Height = flat.Height;
  copy.Depth = 1;
  return copy;
}

CUDA_MEMSET_NODE_PARAMS fill_of(CUdeviceptr dst, size_t pitch, unsigned value, unsigned unit, size_t width,
                                size_t height) {
  CUDA_MEMSET_NODE_PARAMS fill{};
  fill.dst = dst;
  fill.pitch = pitch;
  fill.value = value;
  fill.elementSize = unit;
  fill.width = width;
  fill.height = height;
  return fill;
}

// A fill is asynchronous to the host even without a stream of its own.
CUresult fill_now(const CUDA_MEMSET_NODE_PARAMS &fill) {
  return locked_call([&] {
    current_context();
    const auto stream = default_stream();
    refuse_capturing(*stream);
    check_fill(fill);
    enqueue(*stream, [fill] { run_fill(fill); });
  });
}

CUresult fill_later(const CUDA_MEMSET_NODE_PARAMS &fill, CUstream handle) {
  return locked_call([&] {
    const auto stream = resolve_stream(handle);
    check_fill(fill);
    if (capturing(*stream)) {
      if (fill.width == 0 || fill.height == 0) return;
      capture_work(*stream, FillWork{fill, Handles<Context, CUcontext>::handle(stream->context.lock())});
      return;
    }
    enqueue(*stream, [fill] { run_fill(fill); });
  });
}

CUresult now(const CUDA_MEMCPY3D &copy) {
  return call([&] { copy_now(copy); });
}

CUresult later(const CUDA_MEMCPY3D &copy, CUstream stream) {
  return call([&] { copy_later(copy, stream); });
}

}  // namespace

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
  return now(linear_copy(kUnified, dst, kUnified, src, ByteCount));
}

SOFTCUDA_API cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
  return later(linear_copy(kUnified, dst, kUnified, src, ByteCount), hStream);
}

SOFTCUDA_API cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount) {
  return now(linear_copy(kDevice, dstDevice, kHost, at(srcHost), ByteCount));
}

SOFTCUDA_API cuMemcpyDtoH_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount) {
  return now(linear_copy(kHost, at(dstHost), kDevice, srcDevice, ByteCount));
}

SOFTCUDA_API cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
  return now(linear_copy(kDevice, dstDevice, kDevice, srcDevice, ByteCount));
}

SOFTCUDA_API cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream) {
  return later(linear_copy(kDevice, dstDevice, kHost, at(srcHost), ByteCount), hStream);
}

SOFTCUDA_API cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
  return later(linear_copy(kHost, at(dstHost), kDevice, srcDevice, ByteCount), hStream);
}

SOFTCUDA_API cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
  return later(linear_copy(kDevice, dstDevice, kDevice, srcDevice, ByteCount), hStream);
}

SOFTCUDA_API cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext, CUdeviceptr srcDevice, CUcontext, size_t ByteCount) {
  return now(linear_copy(kDevice, dstDevice, kDevice, srcDevice, ByteCount));
}

SOFTCUDA_API cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext, CUdeviceptr srcDevice, CUcontext, size_t ByteCount,
                               CUstream hStream) {
  return later(linear_copy(kDevice, dstDevice, kDevice, srcDevice, ByteCount), hStream);
}

SOFTCUDA_API cuMemcpy2D_v2(const CUDA_MEMCPY2D *pCopy) {
  return pCopy == nullptr ? CUDA_ERROR_INVALID_VALUE : now(from_2d(*pCopy));
}

SOFTCUDA_API cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *pCopy) {
  return pCopy == nullptr ? CUDA_ERROR_INVALID_VALUE : now(from_2d(*pCopy));
}

SOFTCUDA_API cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream) {
  return pCopy == nullptr ? CUDA_ERROR_INVALID_VALUE : later(from_2d(*pCopy), hStream);
}

SOFTCUDA_API cuMemcpy3D_v2(const CUDA_MEMCPY3D *pCopy) {
  return pCopy == nullptr ? CUDA_ERROR_INVALID_VALUE : now(*pCopy);
}

SOFTCUDA_API cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *pCopy, CUstream hStream) {
  return pCopy == nullptr ? CUDA_ERROR_INVALID_VALUE : later(*pCopy, hStream);
}

SOFTCUDA_API cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N) {
  return fill_now(fill_of(dstDevice, 0, uc, 1, N, 1));
}

SOFTCUDA_API cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N) {
  return fill_now(fill_of(dstDevice, 0, us, 2, N, 1));
}

SOFTCUDA_API cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N) {
  return fill_now(fill_of(dstDevice, 0, ui, 4, N, 1));
}

SOFTCUDA_API cuMemsetD2D8_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height) {
  return fill_now(fill_of(dstDevice, dstPitch, uc, 1, Width, Height));
}

SOFTCUDA_API cuMemsetD2D16_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height) {
  return fill_now(fill_of(dstDevice, dstPitch, us, 2, Width, Height));
}

SOFTCUDA_API cuMemsetD2D32_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height) {
  return fill_now(fill_of(dstDevice, dstPitch, ui, 4, Width, Height));
}

SOFTCUDA_API cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream) {
  return fill_later(fill_of(dstDevice, 0, uc, 1, N, 1), hStream);
}

SOFTCUDA_API cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream) {
  return fill_later(fill_of(dstDevice, 0, us, 2, N, 1), hStream);
}

SOFTCUDA_API cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) {
  return fill_later(fill_of(dstDevice, 0, ui, 4, N, 1), hStream);
}

SOFTCUDA_API cuMemsetD2D8Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height,
                               CUstream hStream) {
  return fill_later(fill_of(dstDevice, dstPitch, uc, 1, Width, Height), hStream);
}

SOFTCUDA_API cuMemsetD2D16Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height,
                                CUstream hStream) {
  return fill_later(fill_of(dstDevice, dstPitch, us, 2, Width, Height), hStream);
}

SOFTCUDA_API cuMemsetD2D32Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height,
                                CUstream hStream) {
  return fill_later(fill_of(dstDevice, dstPitch, ui, 4, Width, Height), hStream);
}
