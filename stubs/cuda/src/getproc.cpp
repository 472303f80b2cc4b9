// SPDX-License-Identifier: Apache-2.0
//
// cuGetProcAddress.  exports.inc lists every call that the driver has, each with the CUDA version in which it came,
// oldest first where a name has several, and with its per-thread variant.
#include <cstring>
#include <iterator>

#include "exports.h"

namespace {

struct Row {
  const char *name;  // without a version
  int version;
  void *symbol;
  int per_thread_version;
  void *per_thread;  // null if the call names no stream and uses none
};

#define SOFTCUDA_EXPORT(name, version, symbol) {#name, version, reinterpret_cast<void *>(&symbol), 0, nullptr},
#define SOFTCUDA_EXPORT_PER_THREAD(name, version, symbol, per_thread_version, per_thread) \
  {#name, version, reinterpret_cast<void *>(&symbol), per_thread_version, reinterpret_cast<void *>(&per_thread)},
const Row kRows[] = {
#include "exports.inc"
};
#undef SOFTCUDA_EXPORT
#undef SOFTCUDA_EXPORT_PER_THREAD

CUdriverProcAddressQueryResult find(const char *name, int version, bool per_thread, void **out) {
  const Row *best = nullptr;
  bool known = false;
  for (const Row &row : kRows) {
    if (std::strcmp(row.name, name) != 0) continue;
    known = true;
    if (row.version <= version && (best == nullptr || row.version >= best->version)) best = &row;
  }
  *out = nullptr;
  if (!known) return CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (best == nullptr) return CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
  const bool own = per_thread && best->per_thread != nullptr;
  if (own && best->per_thread_version > version) return CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
  *out = own ? best->per_thread : best->symbol;
  return CU_GET_PROC_ADDRESS_SUCCESS;
}

bool valid(const char *symbol, void **pfn, int version, cuuint64_t flags) {
  constexpr cuuint64_t known = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  return symbol != nullptr && pfn != nullptr && version > 0 && version <= CUDA_VERSION && (flags & ~known) == 0;
}

}  // namespace

// What is not there is no error of the call: the pointer is null and the status says why.
SOFTCUDA_API cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *symbolStatus) {
  if (!valid(symbol, pfn, cudaVersion, flags)) return CUDA_ERROR_INVALID_VALUE;
  const auto status = find(symbol, cudaVersion, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, pfn);
  if (symbolStatus != nullptr) *symbolStatus = status;
  return CUDA_SUCCESS;
}

// The first version of the call has no status and says it in the result.
SOFTCUDA_API cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags) {
  if (!valid(symbol, pfn, cudaVersion, flags)) return CUDA_ERROR_INVALID_VALUE;
  const auto status = find(symbol, cudaVersion, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, pfn);
  return status == CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
