// SPDX-License-Identifier: Apache-2.0
//
// Stream-ordered allocation.  Memory is there from the call on and goes when the stream comes to the free; nothing is
// kept for reuse.  Under capture it becomes allocation and free nodes.
#include "pool.h"

#include <algorithm>
#include <cstring>

#include "capture.h"
#include "context.h"
#include "memory.h"

namespace softcuda {

namespace {

using PoolHandles = Handles<MemPool, CUmemoryPool>;

std::shared_ptr<MemPool> current_pool(Device &device) {
  if (device.current_pool == nullptr) device.current_pool = default_pool(device);
  return device.current_pool;
}

CUdeviceptr allocate_async(size_t bytes, const std::shared_ptr<MemPool> &pool, Stream &stream) {
  require(bytes > 0);
  const auto context = stream.context.lock();
  if (capturing(stream)) {
    AllocWork work;
    work.memory = std::make_shared<Allocation>(pool->device, bytes);
    work.params.poolProps = pool->properties;
    work.params.bytesize = bytes;
    work.params.dptr = work.memory->address;
    ranges().add(work.memory->range(Kind::Pool, context));
    const CUdeviceptr address = work.params.dptr;
    capture_work(stream, std::move(work));
    ++counters().allocations;
    return address;
  }
  const CUdeviceptr address = allocate(pool->device, bytes, Kind::Pool, context);
  ranges().find(address)->pool = pool;
  pool->used += bytes;
  pool->used_high = std::max(pool->used_high, pool->used);
  return address;
}

void free_async(CUdeviceptr address, Stream &stream) {
  if (capturing(stream)) {
    capture_work(stream, FreeWork{address});
    return;
  }
  Range *range = ranges().starting_at(address);
  require(range != nullptr && (range->kind == Kind::Pool || range->kind == Kind::Plain));
  require(allocations().count(address) != 0);
  if (range->pool != nullptr) range->pool->used -= range->bytes;
  // A second free of the same address is the program's error from here on.
  const auto allocation = allocations().at(address);
  deallocate(address);
  enqueue(stream, [allocation] {});
}

// CUmemPool_attribute values are int or cuuint64_t.
bool is_flag(CUmemPool_attribute attribute) {
  return attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

int &flag_of(MemPool &pool, CUmemPool_attribute attribute) {
  if (attribute == CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES) return pool.reuse_event;
  if (attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC) return pool.reuse_opportunistic;
  return pool.reuse_internal;
}

}  // namespace

std::shared_ptr<MemPool> default_pool(Device &device) {
  if (device.default_pool == nullptr) {
    device.default_pool = process().pools.make();
    device.default_pool->device = device.ordinal;
    device.default_pool->properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    device.default_pool->properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device.ordinal};
  }
  return device.default_pool;
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
  return locked_call([&] {
    require(dptr != nullptr);
    const auto stream = resolve_stream(hStream);
    *dptr = allocate_async(bytesize, current_pool(device_at(stream->context.lock()->device)), *stream);
  });
}

SOFTCUDA_API cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
  return locked_call([&] {
    require(dptr != nullptr);
    const auto stream = resolve_stream(hStream);
    *dptr = allocate_async(bytesize, process().pools.get(pool, CUDA_ERROR_INVALID_VALUE), *stream);
  });
}

SOFTCUDA_API cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
  return locked_call([&] {
    const auto stream = resolve_stream(hStream);
    if (dptr != 0) free_async(dptr, *stream);
  });
}

SOFTCUDA_API cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev) {
  return locked_call([&] {
    require(pool_out != nullptr);
    *pool_out = PoolHandles::handle(default_pool(device_at(dev)));
  });
}

SOFTCUDA_API cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev) {
  return locked_call([&] {
    require(pool != nullptr);
    *pool = PoolHandles::handle(current_pool(device_at(dev)));
  });
}

SOFTCUDA_API cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
  return locked_call([&] {
    Device &device = device_at(dev);
    const auto found = process().pools.get(pool, CUDA_ERROR_INVALID_VALUE);
    require(found->device == dev);
    device.current_pool = found;
  });
}

SOFTCUDA_API cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps) {
  return locked_call([&] {
    require(pool != nullptr && poolProps != nullptr && poolProps->allocType == CU_MEM_ALLOCATION_TYPE_PINNED);
    require(poolProps->location.type == CU_MEM_LOCATION_TYPE_DEVICE);
    require(poolProps->handleTypes == CU_MEM_HANDLE_TYPE_NONE, CUDA_ERROR_NOT_SUPPORTED);
    device_at(poolProps->location.id);
    const auto made = process().pools.make();
    made->device = poolProps->location.id;
    made->properties = *poolProps;
    *pool = PoolHandles::handle(made);
  });
}

SOFTCUDA_API cuMemPoolDestroy(CUmemoryPool pool) {
  return locked_call([&] {
    const auto found = process().pools.get(pool, CUDA_ERROR_INVALID_VALUE);
    Device &device = device_at(found->device);
    require(found != device.default_pool);
    if (device.current_pool == found) device.current_pool = default_pool(device);
    process().pools.remove(found.get());
  });
}

SOFTCUDA_API cuMemPoolTrimTo(CUmemoryPool pool, size_t) {
  return locked_call([&] { process().pools.get(pool, CUDA_ERROR_INVALID_VALUE); });
}

SOFTCUDA_API cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value) {
  return locked_call([&] {
    require(value != nullptr);
    const auto found = process().pools.get(pool, CUDA_ERROR_INVALID_VALUE);
    if (is_flag(attr)) {
      std::memcpy(&flag_of(*found, attr), value, sizeof(int));
    } else if (attr == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
      std::memcpy(&found->release_threshold, value, sizeof found->release_threshold);
    } else {
      uint64_t given = 0;
      std::memcpy(&given, value, sizeof given);
      require(given == 0 && (attr == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH || attr == CU_MEMPOOL_ATTR_USED_MEM_HIGH));
      found->used_high = found->used;
    }
  });
}

SOFTCUDA_API cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value) {
  return locked_call([&] {
    require(value != nullptr);
    const auto found = process().pools.get(pool, CUDA_ERROR_INVALID_VALUE);
    if (is_flag(attr)) {
      std::memcpy(value, &flag_of(*found, attr), sizeof(int));
      return;
    }
    const uint64_t answer = attr == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD ? found->release_threshold
                            : attr == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT || attr == CU_MEMPOOL_ATTR_USED_MEM_CURRENT
                                ? found->used
                                : found->used_high;
    std::memcpy(value, &answer, sizeof answer);
  });
}

SOFTCUDA_API cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count) {
  return locked_call([&] {
    process().pools.get(pool, CUDA_ERROR_INVALID_VALUE);
    require(count == 0 || map != nullptr);
    for (size_t i = 0; i < count; ++i) device_at(map[i].location.id);
  });
}

SOFTCUDA_API cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location) {
  return locked_call([&] {
    require(flags != nullptr && location != nullptr);
    process().pools.get(memPool, CUDA_ERROR_INVALID_VALUE);
    device_at(location->id);
    *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  });
}
