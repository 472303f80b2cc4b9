// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <dlfcn.h>

#include <memory>

namespace ncclstub {
namespace {

// Failing once is failing for good: whether a driver can be opened does not change in a process's life.
std::unique_ptr<DriverTable> open_driver() {
  void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    log(2, "libcuda.so.1 cannot be opened (%s): install a driver or put the software driver on LD_LIBRARY_PATH",
        dlerror());
    return nullptr;
  }
  const auto get = reinterpret_cast<decltype(&::cuGetProcAddress_v2)>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    log(2, "libcuda.so.1 has no cuGetProcAddress_v2: use a driver for CUDA 12.4 or newer");
    return nullptr;
  }
  auto table = std::make_unique<DriverTable>();
  CUdriverProcAddressQueryResult status;
#define NCCLSTUB_RESOLVE(name, version)                                                              \
  {                                                                                                  \
    void *address = nullptr;                                                                         \
    if (get(#name, &address, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status) == CUDA_SUCCESS) { \
      table->name = reinterpret_cast<decltype(table->name)>(address);                                \
    }                                                                                                \
  }
  NCCLSTUB_DRIVER_FUNCTIONS(NCCLSTUB_RESOLVE)
#undef NCCLSTUB_RESOLVE
  table->set_owner = reinterpret_cast<void (*)(uint32_t)>(dlsym(library, "softcuda_set_owner"));
  return table;
}

}  // namespace

const DriverTable *driver() {
  static const std::unique_ptr<DriverTable> table = open_driver();
  if (table == nullptr) fail(ncclUnhandledCudaError, "there is no CUDA driver that NCCL can use: see the line before");
  return table.get();
}

ncclResult_t driver_failed(const DriverTable &table, const char *name, CUresult result) {
  const char *text = nullptr;
  if (table.cuGetErrorName == nullptr || table.cuGetErrorName(result, &text) != CUDA_SUCCESS) text = "unknown error";
  return fail(ncclUnhandledCudaError, "%s failed with %d (%s)", name, static_cast<int>(result), text);
}

ContextScope::ContextScope(CUcontext context) {
  CUcontext current = nullptr;
  result_ = CU(cuCtxGetCurrent, &current);
  if (result_ != ncclSuccess || current == context) return;
  result_ = CU(cuCtxPushCurrent, context);
  pushed_ = result_ == ncclSuccess;
}

ContextScope::~ContextScope() {
  CUcontext popped = nullptr;
  if (pushed_) CU(cuCtxPopCurrent, &popped);
}

ncclResult_t primary_context(int device, CUcontext *context) {
  NCCL_TRY(CU(cuInit, 0u));
  CUdevice handle = 0;
  NCCL_TRY(CU(cuDeviceGet, &handle, device));
  return CU(cuDevicePrimaryCtxRetain, context, handle);
}

ncclResult_t current_context(CUcontext *context, int *device) {
  *context = nullptr;
  NCCL_TRY(CU(cuInit, 0u));
  NCCL_TRY(CU(cuCtxGetCurrent, context));
  if (*context == nullptr) {
    *device = 0;
    NCCL_TRY(primary_context(0, context));
    return CU(cuCtxSetCurrent, *context);
  }
  CUdevice handle = 0;
  NCCL_TRY(CU(cuCtxGetDevice, &handle));
  *device = handle;
  return ncclSuccess;
}

}  // namespace ncclstub
