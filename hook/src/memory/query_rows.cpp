// SPDX-License-Identifier: Apache-2.0
//
// Overrides: what programs ask about an address.  The driver knows mappings, shared by many small allocations; programs
// expect the allocation that they made (registration caches use its bounds and its id as keys).
#include "interpose/concepts.h"
#include "memory/rows.h"

using namespace foundryd;
using namespace foundryd::memory;

namespace {

// The driver's own ids are small numbers.
constexpr unsigned long long kOurIds = 1ull << 62;

// Whether `attribute` is one that the arenas answer.
bool answer(CUpointer_attribute attribute, const Place &place, uint64_t serial, void *into) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr *>(into) = place.base;
      return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<size_t *>(into) = place.bytes;
      return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long *>(into) = kOurIds | serial;
      return true;
    default:
      return false;
  }
}

}  // namespace

FDY_OVERRIDE CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
  if (!overriding() || !Arenas::instance().contains(address))
    return FDY_NEXT(cuMemGetAddressRange_v2, base, bytes, address);
  const auto found = Arenas::instance().find(address);
  if (!found) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = found->first.base;
  if (bytes) *bytes = found->first.bytes;
  return CUDA_SUCCESS;
}

FDY_OVERRIDE CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
  if (!overriding() || !data || !Arenas::instance().contains(address))
    return FDY_NEXT(cuPointerGetAttribute, data, attribute, address);
  const auto found = Arenas::instance().find(address);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  if (answer(attribute, found->first, found->second, data)) return CUDA_SUCCESS;
  return FDY_NEXT(cuPointerGetAttribute, data, attribute, address);
}

FDY_OVERRIDE CUresult CUDAAPI cuPointerGetAttributes(unsigned int number, CUpointer_attribute *attributes, void **data,
                                                     CUdeviceptr address) {
  const CUresult result = FDY_NEXT(cuPointerGetAttributes, number, attributes, data, address);
  if (result != CUDA_SUCCESS || !overriding()) return result;
  // What an engine mapped itself, the driver knows as such.
  if (!Arenas::instance().contains(address)) return result;
  if (const auto found = Arenas::instance().find(address))
    for (unsigned int i = 0; i < number; ++i) answer(attributes[i], found->first, found->second, data[i]);
  return result;
}

namespace foundryd::memory {

std::span<const Row> query_rows() {
  static const Row table[] = {
      FDY_ROW("cuMemGetAddressRange", cuMemGetAddressRange_v2, 3020),
      FDY_ROW("cuPointerGetAttribute", cuPointerGetAttribute, 4000),
      FDY_ROW("cuPointerGetAttributes", cuPointerGetAttributes, 7000),
  };
  return table;
}

}  // namespace foundryd::memory
