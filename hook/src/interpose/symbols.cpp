// SPDX-License-Identifier: Apache-2.0
//
// What dlsym and dlvsym answer for a name that a row claims.
#include <dlfcn.h>
#include <link.h>

#include <cstring>

#include "interpose/lookup.h"
#include "support/log.h"
#include "support/real_dl.h"

namespace foundryd::interpose {
namespace {

// Two registers: see dlsym_x86_64.S.
struct Route {
  void *jump;   // the C library's function, to be entered as if the program had called it; or nullptr
  void *value;  // the answer
};

const Row *row_of_symbol(const char *name) noexcept {
  const bool ours = name && (!std::strncmp(name, "cu", 2) || !std::strncmp(name, "nccl", 4));
  if (!ours) return nullptr;
  for (auto rows : all_rows())
    for (const Row &row : rows)
      if (!std::strcmp(row.symbol, name)) return &row;
  return nullptr;
}

// The hook's exports are in the global scope of every process that it is preloaded into; a program must not find there
// what it would not find without the hook.
bool available(const Row &row, const void *caller) noexcept {
  if (row.library == Library::driver && !driver::loaded()) return false;
  return row.original->find(caller) != nullptr;
}

void *substitute(const Row &row, void *found, const void *caller) noexcept {
  if (!found) return nullptr;
  if (within_hook(found)) return available(row, caller) ? row.override_with : nullptr;
  if (mode() == FDY_MODE_OFF || forked_with_contexts()) return found;
  if (row.library == Library::driver) {
    // Anything else under this name is somebody's wrapper, and was asked for.
    if (found != driver::symbol(row.symbol)) return found;
    row.original->find(caller);
    return row.override_with;
  }
  if (!row.original->bind(found)) {
    warn("a second library with %s was opened, and its calls are not recorded: load one NCCL in a process", row.symbol);
    return found;
  }
  return row.override_with;
}

// RTLD_NEXT is always the C library's business.  A caller before the hook gets the hook's export, as it gets any other
// preloaded library's; one behind it is an interposer itself and must get what lies behind *it*, or it would call the
// hook that called it.
template <class Real, class... Version>
Route route(Real real, void *handle, const char *name, const void *caller, Version... version) noexcept {
  const Route untouched{reinterpret_cast<void *>(real), nullptr};
  if (handle == RTLD_NEXT || driver::inside()) return untouched;
  const Row *row = row_of_symbol(name);
  if (!row) return untouched;
  if (handle == RTLD_DEFAULT) {
    if (available(*row, caller)) return untouched;        // finds the hook's export in the caller's scope
    return {nullptr, real(RTLD_NEXT, name, version...)};  // finds nothing, and leaves the reason for dlerror
  }
  void *found = real(handle, name, version...);
  void *answer = substitute(*row, found, caller);
  if (found && !answer) answer = real(RTLD_NEXT, name, version...);
  return {nullptr, answer};
}

const link_map *object_of(const void *address) noexcept {
  Dl_info info{};
  void *map = nullptr;
  return dladdr1(address, &info, &map, RTLD_DL_LINKMAP) ? static_cast<const link_map *>(map) : nullptr;
}

// Whether the caller comes before the hook in the order in which libraries are searched.
bool in_front(const void *caller) noexcept {
  const link_map *ours = object_of(reinterpret_cast<const void *>(&in_front));
  const link_map *theirs = object_of(caller);
  if (!ours || theirs == ours) return false;
  while (theirs && theirs != ours) theirs = theirs->l_next;
  return theirs == ours;
}

// Another hook in front of this one forwards to the dlsym behind itself, which it asks for with the C library's
// version, for dlsym is what it defines itself.  That is this hook's, whose exports have no version: the C library
// passes it over.
void *next_lookup(void *handle, const char *name, const void *caller) noexcept {
  if (handle != RTLD_NEXT || !name) return nullptr;
  void *own = same(name, "dlsym")    ? reinterpret_cast<void *>(&::dlsym)
              : same(name, "dlvsym") ? reinterpret_cast<void *>(&::dlvsym)
                                     : nullptr;
  return own && mode() != FDY_MODE_OFF && in_front(caller) ? own : nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) Route fdy_route_dlsym(void *handle, const char *name,
                                                                       const void *caller) noexcept {
  return route(real_dlsym(), handle, name, caller);
}

extern "C" __attribute__((visibility("hidden"))) Route fdy_route_dlvsym(void *handle, const char *name,
                                                                        const char *version,
                                                                        const void *caller) noexcept {
  if (void *own = next_lookup(handle, name, caller)) return {nullptr, own};
  return route(real_dlvsym(), handle, name, caller, version);
}

}  // namespace foundryd::interpose
