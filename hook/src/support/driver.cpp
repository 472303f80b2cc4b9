// SPDX-License-Identifier: Apache-2.0
#include "support/driver.h"

#include <dlfcn.h>

#include "support/real_dl.h"

namespace foundryd::driver {
namespace {

constexpr const char *kLibrary = "libcuda.so.1";
constinit std::atomic<void *> kept{nullptr};

// The program's own copy if it has one.  Kept for the life of the process.
void *handle() noexcept {
  void *library = kept.load(std::memory_order_acquire);
  if (library) return library;
  library = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) library = dlopen(kLibrary, RTLD_LAZY | RTLD_LOCAL);
  if (library) kept.store(library, std::memory_order_release);
  return library;
}

}  // namespace

void *symbol(const char *name) noexcept {
  void *library = handle();
  return library ? real_dlsym()(library, name) : nullptr;
}

bool loaded() noexcept {
  if (kept.load(std::memory_order_acquire)) return true;
  void *library = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return false;
  dlclose(library);
  return true;
}

}  // namespace foundryd::driver
