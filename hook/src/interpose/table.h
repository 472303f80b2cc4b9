// SPDX-License-Identifier: Apache-2.0
//
// How the hook gets in front of a function.  An override is a C function with the very name of the function that it
// stands in front of, exported by the hook; a row says how else programs ask for it:
//
//   FDY_OVERRIDE CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
//     if (!overriding()) return FDY_NEXT(cuMemAlloc_v2, address, bytes);
//     ...
//   }
//   std::span<const Row> rows() {
//     static const Row table[] = {
//         FDY_ROW("cuMemAlloc", cuMemAlloc_v2, 3020),
//         FDY_ROW_LEGACY_STREAM("cuMemAllocAsync", cuMemAllocAsync, 11020),
//         FDY_ROW_PER_THREAD_STREAM("cuMemAllocAsync", cuMemAllocAsync_ptsz, 11020),
//         FDY_NCCL_ROW(ncclAllReduce),
//     };
//     return table;
//   }
//
// Three ways in: ELF symbols (programs and libraries linked to the real library), dlsym and dlvsym, and
// cuGetProcAddress with its versions and per-thread-stream flags.  NCCL functions come by the first two only.
// FDY_NEXT calls what the program would have called without the hook.
#ifndef FOUNDRYD_HOOK_INTERPOSE_TABLE_H
#define FOUNDRYD_HOOK_INTERPOSE_TABLE_H

#include <atomic>
#include <cstdint>
#include <span>
#include <type_traits>

#include "support/cuda.h"
#include "support/driver.h"
#include "support/mode.h"

namespace foundryd {

enum class Library : uint8_t { driver, nccl };

// Which meaning of stream 0 a symbol has.
enum class Streams : uint8_t { none, legacy, per_thread };

// The function that an override stands in front of, found at first need and then kept.
class Next {
 public:
  constexpr Next(const char *symbol, Library library) : symbol_(symbol), library_(library) {}
  // nullptr if neither the next object in the process nor the library itself has it.  `caller` is an address in the
  // program's code that asks, or nullptr.
  void *find(const void *caller = nullptr) noexcept;
  // Keeps `address` if nothing was kept yet; whether `address` is what is kept.
  bool bind(void *address) noexcept;
  void *known() const noexcept { return address_.load(std::memory_order_acquire); }
  Library library() const noexcept { return library_; }

 private:
  const char *symbol_;
  Library library_;
  std::atomic<void *> address_{nullptr};
};

constexpr Library library_of(const char *symbol) {
  return symbol[0] == 'n' ? Library::nccl : Library::driver;
}

template <Name name>
inline constinit Next next{name.text, library_of(name.text)};

struct Row {
  const char *name;    // as cuGetProcAddress knows it: without version and stream suffix
  const char *symbol;  // as the library exports it
  int since;           // the first CUDA version for which cuGetProcAddress answers with this symbol
  Streams streams;
  Library library;
  void *override_with;
  Next *original;
};

// What a missing function answers.
template <class R>
constexpr R missing_function() {
  if constexpr (std::is_same_v<R, CUresult>) {
    return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
  } else {
    return static_cast<R>(3);  // ncclInternalError
  }
}

// Inlined, so that the return address is the program's.
template <Name name, class R, class... P>
[[gnu::always_inline]] inline R call_next(R (*)(P...), std::type_identity_t<P>... arguments) noexcept {
  // Another interposer behind the hook that asks the driver for its functions gets overrides, and calls them from
  // inside the call that the hook passed on to it: the second time the driver itself is meant.
  const bool again = library_of(name.text) == Library::driver && driver::inside();
  void *found = again ? driver::entry<name>() : next<name>.known();
  if (!found) found = next<name>.find(__builtin_return_address(0));
  auto function = reinterpret_cast<R (*)(P...)>(found);
  if (!function) return missing_function<R>();
  if constexpr (library_of(name.text) == Library::driver) {
    driver::Inside guard;
    return function(arguments...);
  } else {
    return function(arguments...);
  }
}

// Every row of the hook, by concept.
std::span<const std::span<const Row>> all_rows() noexcept;

}  // namespace foundryd

#define FDY_OVERRIDE extern "C" __attribute__((visibility("default")))

#define FDY_NEXT(symbol, ...) \
  (::foundryd::call_next<#symbol>(static_cast<decltype(&::symbol)>(nullptr) __VA_OPT__(, ) __VA_ARGS__))

#define FDY_ROW_(name, symbol, since, streams)                                           \
  ::foundryd::Row {                                                                      \
    name, #symbol, since, ::foundryd::Streams::streams, ::foundryd::library_of(#symbol), \
        reinterpret_cast<void *>(&::symbol), &::foundryd::next<#symbol>                  \
  }
#define FDY_ROW(name, symbol, since) FDY_ROW_(name, symbol, since, none)
#define FDY_ROW_LEGACY_STREAM(name, symbol, since) FDY_ROW_(name, symbol, since, legacy)
#define FDY_ROW_PER_THREAD_STREAM(name, symbol, since) FDY_ROW_(name, symbol, since, per_thread)
#define FDY_NCCL_ROW(symbol) FDY_ROW_(#symbol, symbol, 0, none)

#endif  // FOUNDRYD_HOOK_INTERPOSE_TABLE_H
