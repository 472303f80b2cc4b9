// SPDX-License-Identifier: Apache-2.0
//
// cuGetProcAddress: the way in of libcudart, libcublas and cuda.bindings.  The real driver decides whether a name
// exists and with which status; the hook only exchanges the pointer.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "interpose/lookup.h"
#include "support/log.h"

namespace foundryd::interpose {
namespace {

bool streams_fit(Streams streams, cuuint64_t flags) noexcept {
  const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
  return streams == Streams::none || (streams == Streams::per_thread) == per_thread;
}

template <class Visit>
void for_rows_named(const char *name, Visit &&visit) {
  for (auto rows : all_rows())
    for (const Row &row : rows)
      if (row.library == Library::driver && (!std::strcmp(row.name, name) || !std::strcmp(row.symbol, name)))
        visit(row);
}

// The symbol that starts exactly at an address, or nullptr.
const char *exported_at(void *address) noexcept {
  Dl_info info{};
  return dladdr(address, &info) && info.dli_saddr == address ? info.dli_sname : nullptr;
}

// The row whose function `found` is.  Drivers may answer with addresses that they do not export; then the version rule
// of the rows decides, the newest that the driver has and the program may use.
const Row *row_for(const char *name, void *found, int version, cuuint64_t flags) {
  const Row *same = nullptr, *by_rule = nullptr;
  for_rows_named(name, [&](const Row &row) {
    void *exported = driver::symbol(row.symbol);
    if (exported == found && streams_fit(row.streams, flags)) same = &row;
    if (!exported || !streams_fit(row.streams, flags)) return;
    const bool exact = !std::strcmp(row.symbol, name) && std::strcmp(row.name, name) != 0;
    if (!exact && row.since > version) return;
    if (!by_rule || row.since > by_rule->since) by_rule = &row;
  });
  if (same || !by_rule) return same;
  return exported_at(found) ? nullptr : by_rule;  // exported under another name: a version that has no row
}

// Asks the real driver, for the check below.
template <class Ask>
bool same_at_known_version(void *found, int version, Ask &&ask) {
  if (version <= CUDA_VERSION) return true;
  void *known = nullptr;
  return ask(&known, CUDA_VERSION) == CUDA_SUCCESS && known == found;
}

template <class Ask>
CUresult get(const char *name, void **function, int version, cuuint64_t flags, Ask &&ask) {
  const CUresult result = ask(function, version);
  if (result != CUDA_SUCCESS || !overriding() || !name || !function || !*function) return result;
  const Row *row = row_for(name, *function, version, flags);
  if (!row) return result;
  if (!same_at_known_version(*function, version, ask)) {
    warn("%s of CUDA %d is newer than the hook knows (%d), so its calls are not seen: update foundryd", name, version,
         CUDA_VERSION);
    return result;
  }
  row->original->find();
  *function = row->override_with;
  return result;
}

}  // namespace
}  // namespace foundryd::interpose

using foundryd::interpose::get;

FDY_OVERRIDE CUresult CUDAAPI cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
  return get(name, function, version, flags,
             [&](void **into, int at_version) { return FDY_NEXT(cuGetProcAddress, name, into, at_version, flags); });
}

FDY_OVERRIDE CUresult CUDAAPI cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                                  CUdriverProcAddressQueryResult *status) {
  return get(name, function, version, flags, [&](void **into, int at_version) {
    return FDY_NEXT(cuGetProcAddress_v2, name, into, at_version, flags, into == function ? status : nullptr);
  });
}

namespace foundryd::interpose {

std::span<const Row> rows() {
  static const Row table[] = {
      FDY_ROW("cuGetProcAddress", cuGetProcAddress, 11030),
      FDY_ROW("cuGetProcAddress", cuGetProcAddress_v2, 12000),
  };
  return table;
}

}  // namespace foundryd::interpose
