// SPDX-License-Identifier: Apache-2.0
//
// Memory and registration.  The stubs copy through host memory, so registering a buffer changes nothing for them.
#include "api.h"
#include "communicator.h"
#include "settings.h"

namespace ncclstub::api {

ncclResult_t ncclMemAlloc(void **address, size_t bytes) {
  if (address == nullptr) return fail(ncclInvalidArgument, "the address for the memory is NULL: pass one");
  *address = nullptr;
  if (bytes == 0) return ncclSuccess;
  CUcontext context = nullptr;
  int device = 0;
  NCCL_TRY(current_context(&context, &device));
  CUdeviceptr memory = 0;
  NCCL_TRY(CU(cuMemAlloc, &memory, bytes));
  *address = reinterpret_cast<void *>(memory);
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void *address) {
  if (address == nullptr) return ncclSuccess;
  return CU(cuMemFree, reinterpret_cast<CUdeviceptr>(address));
}

// NCCL answers NULL with success where it has nothing to register.
ncclResult_t ncclCommRegister(ncclComm_t comm, void *, size_t, void **handle) {
  NCCL_TRY(check_handle(comm));
  if (handle == nullptr) return fail(ncclInvalidArgument, "the address for the handle is NULL: pass one");
  *handle = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void *handle) {
  NCCL_TRY(check_handle(comm));
  if (handle == nullptr) return ncclSuccess;
  return fail(ncclInvalidArgument, "%p was not registered with this communicator: deregister only what was", handle);
}

// Success and NULL, as NCCL answers where symmetric memory is not supported: since 2.28 a window is a device structure
// that kernels read, and there is none here.
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *, size_t, ncclWindow_t *window, int) {
  NCCL_TRY(check_handle(comm));
  if (window == nullptr) return fail(ncclInvalidArgument, "the address for the window is NULL: pass one");
  *window = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  NCCL_TRY(check_handle(comm));
  if (window == nullptr) return ncclSuccess;
  return fail(ncclInvalidArgument, "%p is not a window of this communicator: deregister only what was registered",
              static_cast<void *>(window));
}

}  // namespace ncclstub::api
