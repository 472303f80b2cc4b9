// SPDX-License-Identifier: Apache-2.0
//
// The hook's one internal exception, the thread's last error, and the guards that keep the first from crossing the
// C ABI by turning it into the second.
#ifndef FOUNDRYD_HOOK_SUPPORT_ERROR_H
#define FOUNDRYD_HOOK_SUPPORT_ERROR_H

#include <exception>
#include <new>
#include <utility>

#include "foundryd/hook.h"
#include "support/cuda.h"

namespace foundryd {

// Holds its text inline: it can be built and copied when memory is short.
class Error : public std::exception {
 public:
  // `format` is printf's.  One sentence: the cause, both values, what to do.
  Error(fdy_status status, const char *format, ...) noexcept __attribute__((format(printf, 3, 4)));
  // A failed driver or NCCL call: `code` and `call` travel on their own.
  static Error driver(CUresult code, const char *call) noexcept;
  static Error nccl(int code, const char *call) noexcept;
  // For an override: what the program gets in place of the status's usual result.
  Error answered_with(CUresult result) && noexcept {
    detail_.code = static_cast<int32_t>(result);
    return *this;
  }

  const char *what() const noexcept override { return detail_.message; }
  const fdy_error &detail() const noexcept { return detail_; }
  fdy_status status() const noexcept { return static_cast<fdy_status>(detail_.status); }
  // What an override answers to the program when this error stopped it.
  CUresult as_driver_result() const noexcept;

 private:
  fdy_error detail_{};
};

// The calling thread's last error; success does not clear it.
const fdy_error &last_error() noexcept;
void set_last_error(const fdy_error &error) noexcept;
int fail(const Error &error) noexcept;  // sets it, answers its status

// For functions of the fdy_hook table: `body` returns nothing and throws to fail.
template <class Body>
int guard_api(Body &&body) noexcept {
  try {
    std::forward<Body>(body)();
    return FDY_OK;
  } catch (const Error &error) {
    return fail(error);
  } catch (const std::bad_alloc &) {
    return fail(Error(FDY_ERROR_MEMORY, "host memory ran out inside the hook: free some and try again"));
  } catch (const std::exception &error) {
    return fail(Error(FDY_ERROR_STATE, "unexpected failure inside the hook: %s", error.what()));
  }
}

// For overrides of driver functions: `body` returns a CUresult, or throws.
template <class Body>
CUresult guard_driver(Body &&body) noexcept {
  try {
    return std::forward<Body>(body)();
  } catch (const Error &error) {
    fail(error);
    return error.as_driver_result();
  } catch (const std::exception &error) {
    fail(Error(FDY_ERROR_MEMORY, "failure inside the hook: %s", error.what()));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
}

}  // namespace foundryd

#endif  // FOUNDRYD_HOOK_SUPPORT_ERROR_H
