// SPDX-License-Identifier: Apache-2.0
//
// Overrides: what programs ask about an address.  The driver knows mappings, shared by many small allocations; programs
// expect the allocation that they made (registration caches use its bounds and its id as keys).
#include "interpose/concepts.h"
#include "memory/rows.h"
#include "memory/windows.h"

using namespace foundryd;
using namespace foundryd::memory;

namespace {

// The driver's own ids are small numbers.
constexpr unsigned long long kOurIds = 1ull << 62;

constexpr unsigned long long kWindowIds = kOurIds | 1ull << 61;

// An allocation as programs see it: of this process, or a peer's in its window.
struct Range {
  uint64_t base, bytes;
  unsigned long long id;
};

// Whether the answer is the hook's to give.
bool ours(uint64_t address) {
  return Arenas::instance().contains(address) || Windows::instance().contains(address);
}

std::optional<Range> range_of(uint64_t address) {
  if (const auto found = Arenas::instance().find(address))
    return Range{found->first.base, found->first.bytes, kOurIds | found->second};
  if (const auto found = Windows::instance().find(address))
    return Range{found->base, found->bytes, kWindowIds | found->id};
  return std::nullopt;
}

// Whether `attribute` is one that the range answers.
bool answer(CUpointer_attribute attribute, const Range &range, void *into) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr *>(into) = range.base;
      return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<size_t *>(into) = range.bytes;
      return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long *>(into) = range.id;
      return true;
    default:
      return false;
  }
}

// What an engine mapped itself, the driver knows as such, but for the bounds of its reservation: that is a part of what
// the arenas keep.
void narrow(CUpointer_attribute attribute, uint64_t address, void *into) {
  if (attribute != CU_POINTER_ATTRIBUTE_RANGE_START_ADDR && attribute != CU_POINTER_ATTRIBUTE_RANGE_SIZE) return;
  if (*static_cast<const uint64_t *>(into) == 0) return;  // nothing is mapped there
  if (const auto found = Arenas::instance().reservation(address))
    answer(attribute, Range{found->base, found->bytes, 0}, into);
}

}  // namespace

FDY_OVERRIDE CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
  if (!overriding() || !ours(address)) return FDY_NEXT(cuMemGetAddressRange_v2, base, bytes, address);
  const auto range = range_of(address);
  if (!range) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = range->base;
  if (bytes) *bytes = range->bytes;
  return CUDA_SUCCESS;
}

FDY_OVERRIDE CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
  if (!overriding() || !data || !ours(address)) {
    const CUresult result = FDY_NEXT(cuPointerGetAttribute, data, attribute, address);
    if (result == CUDA_SUCCESS && overriding()) narrow(attribute, address, data);
    return result;
  }
  const auto range = range_of(address);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  if (answer(attribute, *range, data)) return CUDA_SUCCESS;
  return FDY_NEXT(cuPointerGetAttribute, data, attribute, address);
}

FDY_OVERRIDE CUresult CUDAAPI cuPointerGetAttributes(unsigned int number, CUpointer_attribute *attributes, void **data,
                                                     CUdeviceptr address) {
  const CUresult result = FDY_NEXT(cuPointerGetAttributes, number, attributes, data, address);
  if (result != CUDA_SUCCESS || !overriding()) return result;
  if (!ours(address)) {
    for (unsigned int i = 0; i < number; ++i) narrow(attributes[i], address, data[i]);
    return result;
  }
  if (const auto range = range_of(address))
    for (unsigned int i = 0; i < number; ++i) answer(attributes[i], *range, data[i]);
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
