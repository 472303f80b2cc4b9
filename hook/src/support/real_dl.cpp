// SPDX-License-Identifier: Apache-2.0
//
// dlsym cannot be asked for the real dlsym, because any way of asking goes through the hook's own: the C library's
// symbol table is read instead.  Nor is dl_iterate_phdr asked for where that is: others stand before it too, and look
// for the real one by dlsym.
#include "support/real_dl.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <atomic>
#include <cstdint>

namespace foundryd {
namespace {

uint32_t gnu_hash(const char *name) {
  uint32_t hash = 5381;
  for (; *name; ++name) hash = hash * 33 + static_cast<unsigned char>(*name);
  return hash;
}

struct Tables {
  const ElfW(Sym) *symbols = nullptr;
  const char *strings = nullptr;
  const uint32_t *hash = nullptr;
};

Tables tables_of(const link_map &object) {
  Tables out;
  for (const ElfW(Dyn) *entry = object.l_ld; entry && entry->d_tag != DT_NULL; ++entry) {
    // glibc has relocated these pointers in place.
    if (entry->d_tag == DT_SYMTAB) out.symbols = reinterpret_cast<const ElfW(Sym) *>(entry->d_un.d_ptr);
    if (entry->d_tag == DT_STRTAB) out.strings = reinterpret_cast<const char *>(entry->d_un.d_ptr);
    if (entry->d_tag == DT_GNU_HASH) out.hash = reinterpret_cast<const uint32_t *>(entry->d_un.d_ptr);
  }
  return out;
}

void *defined_in(const link_map &object, const char *name) {
  const Tables tables = tables_of(object);
  if (!tables.symbols || !tables.strings || !tables.hash) return nullptr;
  const uint32_t bucket_count = tables.hash[0], first = tables.hash[1], bloom_words = tables.hash[2];
  const uint32_t *buckets = tables.hash + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
  const uint32_t *chains = buckets + bucket_count;
  const uint32_t hash = gnu_hash(name);
  uint32_t at = bucket_count ? buckets[hash % bucket_count] : 0;
  if (at < first) return nullptr;
  for (;; ++at) {
    const uint32_t link = chains[at - first];
    const ElfW(Sym) &symbol = tables.symbols[at];
    if ((link | 1) == (hash | 1) && symbol.st_shndx != SHN_UNDEF && same(tables.strings + symbol.st_name, name))
      return reinterpret_cast<void *>(object.l_addr + symbol.st_value);
    if (link & 1) return nullptr;
  }
}

bool starts_with(const char *text, const char *start) {
  for (; *start && *text == *start; ++text, ++start) {
  }
  return !*start;
}

// libc.so.6 has them since glibc 2.34, libdl.so.2 before.
bool may_have_them(const link_map &object) {
  const char *file = object.l_name ? object.l_name : "";
  for (const char *at = file; *at; ++at)
    if (*at == '/') file = at + 1;
  return starts_with(file, "libc.so") || starts_with(file, "libdl.so");
}

// The C library is among what a program starts with, which comes first in the list and stays, so that it takes no lock.
void *find(const char *name) {
  Dl_info info{};
  void *own = nullptr;
  if (!dladdr1(reinterpret_cast<void *>(&find), &info, &own, RTLD_DL_LINKMAP)) return nullptr;
  auto object = static_cast<const link_map *>(own);
  while (object && object->l_prev) object = object->l_prev;
  for (; object; object = object->l_next) {
    if (!may_have_them(*object)) continue;
    if (void *found = defined_in(*object, name)) return found;
  }
  return nullptr;
}

}  // namespace

DlsymFn real_dlsym() noexcept {
  static constinit std::atomic<DlsymFn> kept{nullptr};
  DlsymFn function = kept.load(std::memory_order_acquire);
  if (!function) {
    function = reinterpret_cast<DlsymFn>(find("dlsym"));
    kept.store(function, std::memory_order_release);
  }
  return function;
}

DlvsymFn real_dlvsym() noexcept {
  static constinit std::atomic<DlvsymFn> kept{nullptr};
  DlvsymFn function = kept.load(std::memory_order_acquire);
  if (!function) {
    function = reinterpret_cast<DlvsymFn>(find("dlvsym"));
    kept.store(function, std::memory_order_release);
  }
  return function;
}

bool within_hook(const void *address) noexcept {
  static constinit std::atomic<void *> kept{nullptr};
  void *own = kept.load(std::memory_order_acquire);
  Dl_info info{};
  if (!own) {
    if (!dladdr(reinterpret_cast<void *>(&within_hook), &info)) return false;
    own = info.dli_fbase;
    kept.store(own, std::memory_order_release);
  }
  return dladdr(address, &info) && info.dli_fbase == own;
}

}  // namespace foundryd
