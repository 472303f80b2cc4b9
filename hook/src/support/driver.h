// SPDX-License-Identifier: Apache-2.0
//
// The one checked path to the real driver.  Nothing here goes through the hook's own symbols, and nothing links to
// libcuda: each function is looked up at its first use, so that one binary works with any driver.  A function that an
// older driver lacks is an error only when it is called.
//
//   FDY_CU(cuMemUnmap, address, bytes);                        // throws Error unless CUDA_SUCCESS
//   CUresult r = FDY_CU_RESULT(cuMemUnmap, address, bytes);    // answers the code
//   if (FDY_CU_HAS(cuKernelGetParamInfo)) ...
//
// Names are exported symbols, with their version: cuMemAlloc_v2.
#ifndef FOUNDRYD_HOOK_SUPPORT_DRIVER_H
#define FOUNDRYD_HOOK_SUPPORT_DRIVER_H

#include <atomic>
#include <cstddef>
#include <type_traits>

#include "support/clock.h"
#include "support/cuda.h"
#include "support/error.h"

namespace foundryd {

// A string as a template argument.
template <size_t N>
struct Name {
  char text[N];
  constexpr Name(const char (&from)[N]) {
    for (size_t i = 0; i < N; ++i) text[i] = from[i];
  }
};

namespace driver {

// An exported function of the real driver, extensions included; nullptr if there is none, or no driver.
void *symbol(const char *name) noexcept;

// Whether libcuda.so.1 is loaded already, by whomever.
bool loaded() noexcept;

namespace detail {
inline constinit thread_local unsigned depth = 0;
}

// While one lives on a thread, that thread is inside the driver on the hook's behalf: overrides pass straight through.
class Inside {
 public:
  Inside() noexcept { ++detail::depth; }
  ~Inside() { --detail::depth; }
  Inside(const Inside &) = delete;
  Inside &operator=(const Inside &) = delete;

 private:
  clock::Timed timed_;
};
inline bool inside() noexcept {
  return detail::depth != 0;
}

template <Name name>
void *entry() noexcept {
  static constinit std::atomic<void *> found{nullptr};
  void *at = found.load(std::memory_order_acquire);
  if (!at) {
    at = symbol(name.text);
    found.store(at, std::memory_order_release);
  }
  return at;
}

// Parameters convert as in a plain call: P comes from the function alone.
template <Name name, class... P>
CUresult result(CUresult (*)(P...), std::type_identity_t<P>... arguments) noexcept {
  auto function = reinterpret_cast<CUresult (*)(P...)>(entry<name>());
  if (!function) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
  Inside guard;
  return function(arguments...);
}

inline void check(CUresult code, const char *call) {
  if (code != CUDA_SUCCESS) throw Error::driver(code, call);
}

}  // namespace driver
}  // namespace foundryd

#define FDY_CU_RESULT(function, ...) \
  (::foundryd::driver::result<#function>(static_cast<decltype(&::function)>(nullptr) __VA_OPT__(, ) __VA_ARGS__))
#define FDY_CU(function, ...) (::foundryd::driver::check(FDY_CU_RESULT(function __VA_OPT__(, ) __VA_ARGS__), #function))
#define FDY_CU_HAS(function) (::foundryd::driver::entry<#function>() != nullptr)

#endif  // FOUNDRYD_HOOK_SUPPORT_DRIVER_H
