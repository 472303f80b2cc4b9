// SPDX-License-Identifier: Apache-2.0
#include "copies.h"

#include <algorithm>
#include <cstring>

#include "capture.h"
#include "context.h"
#include "memory.h"

namespace softcuda {

namespace {

// One side of a copy.
struct Side {
  uint64_t base;  // of the row at (0, 0, 0)
  size_t x, y, z;
  size_t pitch;
  size_t height;
  bool device;

  uint64_t row(size_t at_y, size_t at_z) const { return base + x + pitch * ((z + at_z) * height + y + at_y); }
};

Side side(CUmemorytype type, const void *host, CUdeviceptr device, size_t x, size_t y, size_t z, size_t pitch,
          size_t height, const CUDA_MEMCPY3D &copy) {
  require(type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED,
          CUDA_ERROR_NOT_SUPPORTED);
  const uint64_t address = type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(host) : device;
  // A unified address is device memory if the driver knows it as such.
  bool on_device = type == CU_MEMORYTYPE_DEVICE;
  if (type == CU_MEMORYTYPE_UNIFIED) {
    const Range *range = ranges().find(address);
    on_device = range != nullptr && !range->host();
  }
  return {address,  x, y, z, pitch == 0 ? copy.WidthInBytes + x : pitch, height == 0 ? copy.Height + y : height,
          on_device};
}

Side source(const CUDA_MEMCPY3D &copy) {
  return side(copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcXInBytes, copy.srcY, copy.srcZ, copy.srcPitch,
              copy.srcHeight, copy);
}

Side target(const CUDA_MEMCPY3D &copy) {
  return side(copy.dstMemoryType, copy.dstHost, copy.dstDevice, copy.dstXInBytes, copy.dstY, copy.dstZ, copy.dstPitch,
              copy.dstHeight, copy);
}

void check_side(const Side &at, const CUDA_MEMCPY3D &copy, bool write) {
  require(at.base != 0);
  require(copy.Height * copy.Depth == 1 || at.pitch >= at.x + copy.WidthInBytes);
  require(copy.Depth == 1 || at.height >= at.y + copy.Height);
  if (!at.device) return;
  const uint64_t first = at.row(0, 0);
  const uint64_t last = at.row(copy.Height - 1, copy.Depth - 1) + copy.WidthInBytes;
  require(ranges().covers(first, last - first, write));
}

}  // namespace

bool empty(const CUDA_MEMCPY3D &copy) {
  return copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0;
}

void check_copy(const CUDA_MEMCPY3D &copy) {
  const Side from = source(copy);
  const Side to = target(copy);
  require(copy.srcLOD == 0 && copy.dstLOD == 0);
  if (empty(copy)) return;
  check_side(from, copy, false);
  check_side(to, copy, true);
}

void run_copy(const CUDA_MEMCPY3D &copy) {
  if (empty(copy)) return;
  const auto plain = [](CUmemorytype type, const void *host, CUdeviceptr device) {
    return type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(host) : device;
  };
  const Side from{plain(copy.srcMemoryType, copy.srcHost, copy.srcDevice),
                  copy.srcXInBytes,
                  copy.srcY,
                  copy.srcZ,
                  copy.srcPitch == 0 ? copy.WidthInBytes + copy.srcXInBytes : copy.srcPitch,
                  copy.srcHeight == 0 ? copy.Height + copy.srcY : copy.srcHeight,
                  false};
  const Side to{plain(copy.dstMemoryType, copy.dstHost, copy.dstDevice),
                copy.dstXInBytes,
                copy.dstY,
                copy.dstZ,
                copy.dstPitch == 0 ? copy.WidthInBytes + copy.dstXInBytes : copy.dstPitch,
                copy.dstHeight == 0 ? copy.Height + copy.dstY : copy.dstHeight,
                false};
  for (size_t z = 0; z < copy.Depth; ++z) {
    for (size_t y = 0; y < copy.Height; ++y) {
      std::memmove(reinterpret_cast<void *>(to.row(y, z)), reinterpret_cast<const void *>(from.row(y, z)),
                   copy.WidthInBytes);
    }
  }
}

void check_fill(const CUDA_MEMSET_NODE_PARAMS &fill) {
  const uint64_t unit = fill.elementSize;
  require(unit == 1 || unit == 2 || unit == 4);
  require(fill.dst % unit == 0);
  if (fill.width == 0 || fill.height == 0) return;
  require(fill.height == 1 || (fill.pitch >= fill.width * unit && fill.pitch % unit == 0));
  const uint64_t bytes = (fill.height == 1 ? 0 : fill.pitch * (fill.height - 1)) + fill.width * unit;
  require(ranges().covers(fill.dst, bytes, true));
}

void run_fill(const CUDA_MEMSET_NODE_PARAMS &fill) {
  for (size_t y = 0; y < fill.height; ++y) {
    auto *row = reinterpret_cast<std::byte *>(fill.dst + (fill.height == 1 ? 0 : fill.pitch * y));
    switch (fill.elementSize) {
      case 1:
        std::memset(row, static_cast<int>(fill.value & 0xff), fill.width);
        break;
      case 2:
        std::fill_n(reinterpret_cast<uint16_t *>(row), fill.width, static_cast<uint16_t>(fill.value));
        break;
      default:
        std::fill_n(reinterpret_cast<uint32_t *>(row), fill.width, fill.value);
    }
  }
}

CUDA_MEMCPY3D linear_copy(CUmemorytype to_type, uint64_t to, CUmemorytype from_type, uint64_t from, size_t bytes) {
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = from_type;
  copy.dstMemoryType = to_type;
  if (from_type == CU_MEMORYTYPE_HOST) {
    copy.srcHost = reinterpret_cast<const void *>(from);
  } else {
    copy.srcDevice = from;
  }
  if (to_type == CU_MEMORYTYPE_HOST) {
    copy.dstHost = reinterpret_cast<void *>(to);
  } else {
    copy.dstDevice = to;
  }
  copy.WidthInBytes = bytes;
  copy.Height = 1;
  copy.Depth = 1;
  return copy;
}

}  // namespace softcuda
