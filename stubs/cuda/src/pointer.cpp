// SPDX-License-Identifier: Apache-2.0
//
// What a pointer is: cuPointerGetAttribute(s).
#include <cstring>
#include <utility>

#include "context.h"
#include "memory.h"
#include "pool.h"

namespace softcuda {

std::pair<uint64_t, uint64_t> reservation_around(uint64_t address);
int allowed_handle_types(CUmemGenericAllocationHandle handle);
bool rdma_capable(CUmemGenericAllocationHandle handle);

namespace {

template <class T>
void put(void *data, const T &value) {
  std::memcpy(data, &value, sizeof value);
}

// For this call the range of mapped memory is the reservation; cuMemGetAddressRange says the mapping.
std::pair<uint64_t, uint64_t> around(const Range &range) {
  return range.kind == Kind::Mapped ? reservation_around(range.base) : std::pair(range.base, range.bytes);
}

void answer(void *data, CUpointer_attribute attribute, const Range &range, CUdeviceptr ptr) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return put(data, Handles<Context, CUcontext>::handle(range.context.lock()));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put(data, static_cast<unsigned>(range.host() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      return put(data, ptr);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      // Device memory has no host address, though here it could.
      require(range.host());
      return put(data, reinterpret_cast<void *>(ptr));
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      return put(data, static_cast<int>(range.sync_memops));
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return put(data, static_cast<unsigned long long>(range.buffer_id));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      return put(data, 0);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put(data, static_cast<int>(range.device));
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return put(data, static_cast<int>(range.kind == Kind::Plain));
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return put(data, static_cast<CUdeviceptr>(around(range).first));
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return put(data, static_cast<size_t>(around(range).second));
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return put(data, 1);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return put(data, static_cast<unsigned long long>(allowed_handle_types(range.handle)));
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return put(data, static_cast<int>(range.kind == Kind::Plain || rdma_capable(range.handle)));
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return put(data, static_cast<unsigned long long>(range.access));
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return put(data, Handles<MemPool, CUmemoryPool>::handle(range.pool));
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      return put(data, static_cast<size_t>(range.mapping_bytes));
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      return put(data, static_cast<CUdeviceptr>(range.mapping));
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return put(data, static_cast<unsigned long long>(range.buffer_id));
    default:
      throw Failure{CUDA_ERROR_NOT_SUPPORTED};
  }
}

// cuPointerGetAttributes answers for addresses that the driver does not know.
void answer_unknown(void *data, CUpointer_attribute attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return put(data, 0);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put(data, -2);
    default:
      return put(data, uint64_t{0});
  }
}

}  // namespace

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  return locked_call([&] {
    require(data != nullptr);
    const Range *range = ranges().find(ptr);
    require(range != nullptr);
    answer(data, attribute, *range, ptr);
  });
}

SOFTCUDA_API cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
                                    CUdeviceptr ptr) {
  return locked_call([&] {
    require(attributes != nullptr && data != nullptr);
    const Range *range = ranges().find(ptr);
    for (unsigned i = 0; i < numAttributes; ++i) {
      if (range == nullptr || (attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER && !range->host())) {
        answer_unknown(data[i], attributes[i]);
      } else {
        answer(data[i], attributes[i], *range, ptr);
      }
    }
  });
}

SOFTCUDA_API cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr) {
  return locked_call([&] {
    require(value != nullptr && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
    Range *range = ranges().starting_at(ptr);
    require(range != nullptr && !range->host());
    // Memory from cuMemMap takes the attribute only if it was created for RDMA.
    require(range->kind != Kind::Mapped || rdma_capable(range->handle), CUDA_ERROR_NOT_SUPPORTED);
    int flag = 0;
    std::memcpy(&flag, value, sizeof flag);
    range->sync_memops = flag != 0;
  });
}
