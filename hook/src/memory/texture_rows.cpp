// SPDX-License-Identifier: Apache-2.0
//
// Overrides: texture and surface objects.  Kernels are given small numbers that mean something in this process only,
// and may well be the same in every capture.
#include "interpose/concepts.h"
#include "memory/rows.h"

using namespace foundryd;
using namespace foundryd::memory;

namespace {

CUresult made(CUresult result, const unsigned long long *object) noexcept {
  if (result != CUDA_SUCCESS || !overriding() || !capturing()) return result;
  return guard_driver([&] {
    foreign::add_object(*object);
    return result;
  });
}

}  // namespace

FDY_OVERRIDE CUresult CUDAAPI cuTexObjectCreate(CUtexObject *object, const CUDA_RESOURCE_DESC *resource,
                                                const CUDA_TEXTURE_DESC *texture, const CUDA_RESOURCE_VIEW_DESC *view) {
  return made(FDY_NEXT(cuTexObjectCreate, object, resource, texture, view), object);
}

FDY_OVERRIDE CUresult CUDAAPI cuTexObjectDestroy(CUtexObject object) {
  const CUresult result = FDY_NEXT(cuTexObjectDestroy, object);
  if (result == CUDA_SUCCESS && overriding()) foreign::remove_object(object);
  return result;
}

FDY_OVERRIDE CUresult CUDAAPI cuSurfObjectCreate(CUsurfObject *object, const CUDA_RESOURCE_DESC *resource) {
  return made(FDY_NEXT(cuSurfObjectCreate, object, resource), object);
}

FDY_OVERRIDE CUresult CUDAAPI cuSurfObjectDestroy(CUsurfObject object) {
  const CUresult result = FDY_NEXT(cuSurfObjectDestroy, object);
  if (result == CUDA_SUCCESS && overriding()) foreign::remove_object(object);
  return result;
}

namespace foundryd::memory {

std::span<const Row> texture_rows() {
  static const Row table[] = {
      FDY_ROW("cuTexObjectCreate", cuTexObjectCreate, 5000),
      FDY_ROW("cuTexObjectDestroy", cuTexObjectDestroy, 5000),
      FDY_ROW("cuSurfObjectCreate", cuSurfObjectCreate, 5000),
      FDY_ROW("cuSurfObjectDestroy", cuSurfObjectDestroy, 5000),
  };
  return table;
}

}  // namespace foundryd::memory
