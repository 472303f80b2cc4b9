// SPDX-License-Identifier: Apache-2.0
//
// Calls that programs look for and that this driver answers with "not supported": what a device without the feature
// would say.
#include "capture.h"
#include "context.h"

using namespace softcuda;

namespace {

CUresult refuse() {
  return locked_call([] {
    current_context();
    throw Failure{CUDA_ERROR_NOT_SUPPORTED};
  });
}

}  // namespace

SOFTCUDA_API cuMemAllocManaged(CUdeviceptr *, size_t, unsigned int) {
  return refuse();
}

SOFTCUDA_API cuTexObjectCreate(CUtexObject *, const CUDA_RESOURCE_DESC *, const CUDA_TEXTURE_DESC *,
                               const CUDA_RESOURCE_VIEW_DESC *) {
  return refuse();
}

SOFTCUDA_API cuTexObjectDestroy(CUtexObject) {
  return refuse();
}

SOFTCUDA_API cuSurfObjectCreate(CUsurfObject *, const CUDA_RESOURCE_DESC *) {
  return refuse();
}

SOFTCUDA_API cuSurfObjectDestroy(CUsurfObject) {
  return refuse();
}

SOFTCUDA_API cuMulticastCreate(CUmemGenericAllocationHandle *, const CUmulticastObjectProp *) {
  return refuse();
}

SOFTCUDA_API cuMulticastAddDevice(CUmemGenericAllocationHandle, CUdevice) {
  return refuse();
}

SOFTCUDA_API cuMulticastBindMem(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t,
                                unsigned long long) {
  return refuse();
}

SOFTCUDA_API cuMulticastBindAddr(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long) {
  return refuse();
}

SOFTCUDA_API cuMulticastUnbind(CUmemGenericAllocationHandle, CUdevice, size_t, size_t) {
  return refuse();
}

SOFTCUDA_API cuMulticastGetGranularity(size_t *, const CUmulticastObjectProp *, CUmulticastGranularity_flags) {
  return refuse();
}

SOFTCUDA_API cuIpcGetEventHandle(CUipcEventHandle *, CUevent) {
  return refuse();
}

SOFTCUDA_API cuIpcOpenEventHandle(CUevent *, CUipcEventHandle) {
  return refuse();
}

SOFTCUDA_API cuMemGetHandleForAddressRange(void *, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long) {
  return refuse();
}

SOFTCUDA_API cuGetExportTable(const void **, const CUuuid *) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
