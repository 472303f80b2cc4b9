// SPDX-License-Identifier: Apache-2.0
#include "memory/backing.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "support/driver.h"

namespace foundryd::memory {
namespace {

using Long = unsigned long long;

constexpr uint64_t kUserSpace = 1ull << 47;
constexpr uint64_t kLargeReservation = 1ull << 30;
constexpr size_t kSmallAttempts = 64;
constexpr size_t kLargeAttempts = 2;

uint64_t number_from(const char *name, uint64_t otherwise) {
  const char *text = std::getenv(name);
  if (!text || !*text) return otherwise;
  char *end = nullptr;
  errno = 0;
  const uint64_t value = std::strtoull(text, &end, 0);
  if (errno || *end)
    throw Error(FDY_ERROR_INVALID, "%s is '%s', not a number: give it as 0x600000000000 or in decimal", name, text);
  return value;
}

int attribute_of(CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  return FDY_CU_RESULT(cuDeviceGetAttribute, &value, attribute, device) == CUDA_SUCCESS ? value : 0;
}

}  // namespace

uint64_t Space::device_bytes() const {
  return FDY_ARENA_HOST * stride;
}
uint64_t Space::bytes() const {
  return FDY_ARENA_COUNT * stride;
}

Extent Space::reservations_of(uint32_t arena) const {
  const uint64_t first = FDY_RESERVATION_FIRST + arena * FDY_RESERVATION_STRIDES;
  const uint64_t room = (kUserSpace - base) / stride;  // in strides
  if (room <= first) return {0, 0};
  return {base + first * stride, std::min<uint64_t>(room - first, FDY_RESERVATION_STRIDES) * stride};
}

uint32_t Space::arena_of(uint64_t address) const {
  if (address < base) return FDY_ARENA_COUNT;
  const uint64_t at = (address - base) / stride;
  if (at < FDY_ARENA_COUNT) return static_cast<uint32_t>(at);
  if (at < FDY_RESERVATION_FIRST) return FDY_ARENA_COUNT;
  const uint64_t arena = (at - FDY_RESERVATION_FIRST) / FDY_RESERVATION_STRIDES;
  return arena < FDY_ARENA_HOST ? static_cast<uint32_t>(arena) : FDY_ARENA_COUNT;
}

void check_space(const Space &space) {
  if (space.base == 0 || space.base % kGranule || space.stride == 0 || space.stride % kGranule ||
      space.stride > kUserSpace / FDY_ARENA_COUNT || space.base > kUserSpace - space.bytes())
    throw Error(
        FDY_ERROR_INVALID,
        "arenas of 0x%llx bytes at 0x%llx do not fit: both must be multiples of 0x%llx, and six arenas end below "
        "0x%llx",
        static_cast<Long>(space.stride), static_cast<Long>(space.base), static_cast<Long>(kGranule),
        static_cast<Long>(kUserSpace));
}

Space space_from_environment() {
  Space space;
  space.base = number_from("FOUNDRYD_ARENA_BASE", space.base);
  space.stride = number_from("FOUNDRYD_ARENA_STRIDE", space.stride);
  check_space(space);
  return space;
}

Memory::~Memory() {
  if (handle_) FDY_CU_RESULT(cuMemRelease, handle_);
}

void map_memory(Extent extent, const Memory &memory, CUdevice device) {
  FDY_CU(cuMemMap, extent.base, extent.bytes, 0, memory.handle(), 0);
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const CUresult accessible = FDY_CU_RESULT(cuMemSetAccess, extent.base, extent.bytes, &access, 1);
  if (accessible == CUDA_SUCCESS) return;
  FDY_CU_RESULT(cuMemUnmap, extent.base, extent.bytes);
  throw Error::driver(accessible, "cuMemSetAccess");
}

Reservation reserve_exactly(Extent extent, uint64_t alignment) {
  // What came out elsewhere is kept until then, so that the driver does not give it again.
  std::array<CUdeviceptr, kSmallAttempts> elsewhere{};
  const size_t attempts = extent.bytes < kLargeReservation ? kSmallAttempts : kLargeAttempts;
  size_t count = 0;
  Reservation out{CUDA_SUCCESS, 0};
  while (count < attempts) {
    out.result = FDY_CU_RESULT(cuMemAddressReserve, &out.address, extent.bytes, alignment, extent.base, 0);
    if (out.result != CUDA_SUCCESS || out.address == extent.base) break;
    elsewhere[count++] = out.address;
  }
  for (size_t i = 0; i < count; ++i) FDY_CU_RESULT(cuMemAddressFree, elsewhere[i], extent.bytes);
  return out;
}

void Backing::reserve(const Space &space) {
  const auto [result, got] = reserve_exactly({space.base, space.device_bytes()});
  if (result != CUDA_SUCCESS || got != space.base) {
    throw Error(FDY_ERROR_MEMORY,
                "the arenas' address space came out at 0x%llx (CUresult %d) and not at 0x%llx, so something else lies "
                "there: set FOUNDRYD_ARENA_BASE to another address and capture again",
                static_cast<Long>(got), static_cast<int>(result), static_cast<Long>(space.base));
  }
  void *const wanted = reinterpret_cast<void *>(space.begin_of(FDY_ARENA_HOST));
  void *const host =
      mmap(wanted, space.stride, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (host != wanted) {
    const int reason = host == MAP_FAILED ? errno : 0;
    if (host != MAP_FAILED) munmap(host, space.stride);
    FDY_CU_RESULT(cuMemAddressFree, got, space.device_bytes());
    throw Error(FDY_ERROR_MEMORY,
                "the host arena's address space at %p is not free (%s): set FOUNDRYD_ARENA_BASE to another address and "
                "capture again",
                wanted, reason ? std::strerror(reason) : "the kernel gave another address");
  }
  space_ = space;
}

void Backing::bind(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  // Peers and network cards must be able to use whatever an engine puts here.
  if (attribute_of(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED))
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (attribute_of(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED))
    properties.allocFlags.gpuDirectRDMACapable = 1;
  size_t granularity = 0;
  FDY_CU(cuMemGetAllocationGranularity, &granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (granularity == 0 || kGranule % granularity)
    throw Error(FDY_ERROR_UNSUPPORTED,
                "device %d maps memory in units of %zu bytes, which do not divide the arenas' %llu", device,
                granularity, static_cast<Long>(kGranule));
  properties_ = properties;
  device_ = device;
}

void Backing::reserve_at(Extent extent) {
  RelaxedCapture relaxed;
  const auto [result, got] = reserve_exactly(extent);
  driver::check(result, "cuMemAddressReserve");
  if (got == extent.base) return;
  throw Error(FDY_ERROR_MEMORY,
              "a reservation of %llu bytes came out at 0x%llx and not at 0x%llx, so something else lies there: set "
              "FOUNDRYD_ARENA_BASE to another address and capture again",
              static_cast<Long>(extent.bytes), static_cast<Long>(got), static_cast<Long>(extent.base));
}

void Backing::map(Extent extent) {
  on_host(extent) ? map_host(extent) : map_device(extent);
}

Memory Backing::create(uint64_t bytes) const {
  CUmemGenericAllocationHandle handle = 0;
  FDY_CU(cuMemCreate, &handle, bytes, &properties_, 0);
  return Memory(handle);
}

void Backing::map_device(Extent extent) {
  RelaxedCapture relaxed;
  map_memory(extent, create(extent.bytes), device_);
}

void Backing::map_host(Extent extent) {
  RelaxedCapture relaxed;
  void *const at = reinterpret_cast<void *>(extent.base);
  if (mmap(at, extent.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
    throw Error(FDY_ERROR_MEMORY, "%llu bytes of host memory could not be mapped at %p: %s",
                static_cast<Long>(extent.bytes), at, std::strerror(errno));
  const CUresult result =
      FDY_CU_RESULT(cuMemHostRegister_v2, at, extent.bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  if (result != CUDA_SUCCESS) {
    mmap(at, extent.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    throw Error::driver(result, "cuMemHostRegister_v2");
  }
}

void Backing::unmap(Extent extent) {
  RelaxedCapture relaxed;
  if (!on_host(extent)) {
    FDY_CU(cuMemUnmap, extent.base, extent.bytes);
    return;
  }
  void *const at = reinterpret_cast<void *>(extent.base);
  FDY_CU(cuMemHostUnregister, at);
  // The addresses stay ours.
  if (mmap(at, extent.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
    throw Error(FDY_ERROR_MEMORY, "host memory at %p could not be given back: %s", at, std::strerror(errno));
}

RelaxedCapture::RelaxedCapture() noexcept
    : exchanged_(FDY_CU_RESULT(cuThreadExchangeStreamCaptureMode, &mode_) == CUDA_SUCCESS) {}

RelaxedCapture::~RelaxedCapture() {
  if (exchanged_) FDY_CU_RESULT(cuThreadExchangeStreamCaptureMode, &mode_);
}

}  // namespace foundryd::memory
