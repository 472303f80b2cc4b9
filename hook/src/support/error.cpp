// SPDX-License-Identifier: Apache-2.0
#include "support/error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace foundryd {
namespace {
constinit thread_local fdy_error last{};
}

Error::Error(fdy_status status, const char *format, ...) noexcept {
  detail_.status = status;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(detail_.message, sizeof detail_.message, format, arguments);
  va_end(arguments);
}

Error Error::driver(CUresult code, const char *call) noexcept {
  Error out(FDY_ERROR_DRIVER, "the driver call %s failed with CUresult %d: look the code up in cuda.h", call,
            static_cast<int>(code));
  out.detail_.code = static_cast<int32_t>(code);
  std::snprintf(out.detail_.call, sizeof out.detail_.call, "%s", call);
  return out;
}

Error Error::nccl(int code, const char *call) noexcept {
  Error out(FDY_ERROR_NCCL, "the NCCL call %s failed with ncclResult_t %d: run with NCCL_DEBUG=INFO to see why", call,
            code);
  out.detail_.code = code;
  std::snprintf(out.detail_.call, sizeof out.detail_.call, "%s", call);
  return out;
}

CUresult Error::as_driver_result() const noexcept {
  if (detail_.code != 0 && detail_.status != FDY_ERROR_NCCL) return static_cast<CUresult>(detail_.code);
  switch (detail_.status) {
    case FDY_ERROR_INVALID:
      return CUDA_ERROR_INVALID_VALUE;
    case FDY_ERROR_MEMORY:
      return CUDA_ERROR_MAP_FAILED;
    case FDY_ERROR_NOT_FOUND:
      return CUDA_ERROR_NOT_FOUND;
    case FDY_ERROR_UNSUPPORTED:
      return CUDA_ERROR_NOT_SUPPORTED;
    default:
      return CUDA_ERROR_UNKNOWN;
  }
}

const fdy_error &last_error() noexcept {
  return last;
}
void set_last_error(const fdy_error &error) noexcept {
  last = error;
}

int fail(const Error &error) noexcept {
  last = error.detail();
  return error.status();
}

}  // namespace foundryd
