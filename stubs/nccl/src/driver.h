// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver, opened at the first call and never linked.  CU(cuFunction, arguments...) is the one way to call it:
// it checks the result, and counts the call as communication where the driver counts by owner.
#ifndef NCCLSTUB_DRIVER_H
#define NCCLSTUB_DRIVER_H

#include <cuda.h>

#include "error.h"

namespace ncclstub {

// Function and the CUDA version whose signature of it the header declares.
#define NCCLSTUB_DRIVER_FUNCTIONS(X)          \
  X(cuInit, 2000)                             \
  X(cuGetErrorName, 6000)                     \
  X(cuDeviceGet, 2000)                        \
  X(cuDevicePrimaryCtxRetain, 7000)           \
  X(cuDevicePrimaryCtxRelease, 11000)         \
  X(cuCtxGetCurrent, 4000)                    \
  X(cuCtxSetCurrent, 4000)                    \
  X(cuCtxPushCurrent, 4000)                   \
  X(cuCtxPopCurrent, 4000)                    \
  X(cuCtxGetDevice, 2000)                     \
  X(cuMemAlloc, 3020)                         \
  X(cuMemFree, 3020)                          \
  X(cuMemcpyDtoDAsync, 3020)                  \
  X(cuMemsetD8Async, 3020)                    \
  X(cuEventCreate, 2000)                      \
  X(cuEventDestroy, 4000)                     \
  X(cuEventRecord, 2000)                      \
  X(cuEventSynchronize, 2000)                 \
  X(cuStreamWaitEvent, 3020)                  \
  X(cuStreamGetCaptureInfo, 12030)            \
  X(cuStreamUpdateCaptureDependencies, 12030) \
  X(cuGraphCreate, 10000)                     \
  X(cuGraphDestroy, 10000)                    \
  X(cuGraphAddEmptyNode, 10000)               \
  X(cuGraphAddMemcpyNode, 10000)              \
  X(cuGraphAddMemsetNode, 10000)              \
  X(cuGraphAddChildGraphNode, 10000)          \
  X(cuGraphAddEventWaitNode, 11010)           \
  X(cuGraphAddEventRecordNode, 11010)         \
  X(cuGraphRetainUserObject, 11030)           \
  X(cuUserObjectCreate, 11030)                \
  X(cuUserObjectRelease, 11030)               \
  X(cuLibraryLoadData, 12000)                 \
  X(cuLibraryGetKernel, 12000)                \
  X(cuKernelGetFunction, 12000)               \
  X(cuFuncLoad, 12040)                        \
  X(cuLaunchKernelEx, 11060)

struct DriverTable {
#define NCCLSTUB_MEMBER(name, version) decltype(&::name) name = nullptr;
  NCCLSTUB_DRIVER_FUNCTIONS(NCCLSTUB_MEMBER)
#undef NCCLSTUB_MEMBER
  void (*set_owner)(uint32_t) = nullptr;  // softcuda_set_owner: only the software driver has it
};

// NULL after `fail` if there is no driver.
const DriverTable *driver();

ncclResult_t driver_failed(const DriverTable &table, const char *name, CUresult result);

// Marks the calls of a scope as communication for the software driver's counters.
class OwnerScope {
 public:
  explicit OwnerScope(const DriverTable &table) : set_(table.set_owner) {
    if (set_ != nullptr) set_(1);
  }
  ~OwnerScope() {
    if (set_ != nullptr) set_(0);
  }
  OwnerScope(const OwnerScope &) = delete;
  OwnerScope &operator=(const OwnerScope &) = delete;

 private:
  void (*set_)(uint32_t);
};

template <class... P, class... A>
ncclResult_t driver_call(const char *name, CUresult (*DriverTable::*member)(P...), A... arguments) {
  const DriverTable *table = driver();
  if (table == nullptr) return ncclUnhandledCudaError;
  if (table->*member == nullptr) {
    return fail(ncclUnhandledCudaError, "the CUDA driver has no %s: use a driver for CUDA 12.4 or newer", name);
  }
  const OwnerScope owner(*table);
  const CUresult result = (table->*member)(arguments...);
  return result == CUDA_SUCCESS ? ncclSuccess : driver_failed(*table, name, result);
}

#define CU(name, ...) ::ncclstub::driver_call(#name, &::ncclstub::DriverTable::name __VA_OPT__(, ) __VA_ARGS__)

// Makes a context current for a scope; does nothing where it already is.
class ContextScope {
 public:
  explicit ContextScope(CUcontext context);
  ~ContextScope();
  ContextScope(const ContextScope &) = delete;
  ContextScope &operator=(const ContextScope &) = delete;
  ncclResult_t result() const { return result_; }

 private:
  bool pushed_ = false;
  ncclResult_t result_ = ncclSuccess;
};

// The calling thread's context and its device; without one, the primary context of device 0, retained for good as the
// CUDA runtime does.
ncclResult_t current_context(CUcontext *context, int *device);
ncclResult_t primary_context(int device, CUcontext *context);

}  // namespace ncclstub

#endif  // NCCLSTUB_DRIVER_H
