// SPDX-License-Identifier: Apache-2.0
//
// The C library's own dlsym and dlvsym, past the hook's.
#ifndef FOUNDRYD_HOOK_SUPPORT_REAL_DL_H
#define FOUNDRYD_HOOK_SUPPORT_REAL_DL_H

namespace foundryd {

using DlsymFn = void *(*)(void *handle, const char *name);
using DlvsymFn = void *(*)(void *handle, const char *name, const char *version);

// Never nullptr in a process that runs at all; allocates nothing, so it works while malloc itself is being set up.
DlsymFn real_dlsym() noexcept;
DlvsymFn real_dlvsym() noexcept;

// Whether two names are the same.  Lookups come before a sanitizer's library has its own strcmp.
inline bool same(const char *a, const char *b) noexcept {
  for (; *a && *a == *b; ++a, ++b) {
  }
  return *a == *b;
}

// Whether an address lies in the hook library.
bool within_hook(const void *address) noexcept;

}  // namespace foundryd

#endif  // FOUNDRYD_HOOK_SUPPORT_REAL_DL_H
