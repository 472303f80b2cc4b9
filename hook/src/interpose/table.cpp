// SPDX-License-Identifier: Apache-2.0
#include "interpose/table.h"

#include <dlfcn.h>

#include <array>

#include "interpose/lookup.h"
#include "support/real_dl.h"

namespace foundryd {
namespace {

// In the scope of the program's own code: an engine opened NCCL itself, outside the global scope.
void *in_scope_of(const void *caller, const char *symbol) noexcept {
  Dl_info info{};
  if (!caller || within_hook(caller) || !dladdr(caller, &info) || !info.dli_fname) return nullptr;
  void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return nullptr;
  void *found = real_dlsym()(library, symbol);
  dlclose(library);
  return found && !within_hook(found) ? found : nullptr;
}

void *in_loaded_nccl(const char *symbol) noexcept {
  void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return nullptr;
  void *found = real_dlsym()(library, symbol);
  dlclose(library);
  return found && !within_hook(found) ? found : nullptr;
}

}  // namespace

void *Next::find(const void *caller) noexcept {
  if (void *at = known()) return at;
  // First whatever lies behind the hook in the process: without the hook, that is what a linked program would call.
  void *found = real_dlsym()(RTLD_NEXT, symbol_);
  if (found && within_hook(found)) found = nullptr;
  if (!found) {
    if (library_ == Library::driver) {
      found = driver::symbol(symbol_);
    } else {
      found = in_scope_of(caller, symbol_);
      if (!found) found = in_loaded_nccl(symbol_);
    }
  }
  if (found) bind(found);
  return known();
}

bool Next::bind(void *address) noexcept {
  void *expected = nullptr;
  return address_.compare_exchange_strong(expected, address, std::memory_order_acq_rel) || expected == address;
}

std::span<const std::span<const Row>> all_rows() noexcept {
  static const std::array rows{
      interpose::rows(),  memory::device_rows(), memory::ordered_rows(), memory::host_rows(), memory::query_rows(),
      memory::ipc_rows(), memory::vmm_rows(),    memory::texture_rows(), modules::rows(),     graphs::rows(),
      comm::rows()};
  return rows;
}

namespace interpose {

unsigned installed() noexcept {
  unsigned count = 0;
  for (auto rows : all_rows())
    for (const Row &row : rows) count += row.original->known() != nullptr;
  return count;
}

}  // namespace interpose
}  // namespace foundryd
