// SPDX-License-Identifier: Apache-2.0
//
// What the compiler's static runtime takes of a C library newer than 2.28, because the machine that builds has it.  All
// of it is hidden, and what a library does not use is left out.
#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#if __GLIBC_PREREQ(2, 32)
// Whether the process has one thread, by which reference counts do without atomic operations.  It is not known here.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
#endif

#if __GLIBC_PREREQ(2, 33)
extern "C" {
__attribute__((visibility("hidden"))) int fstat(int descriptor, struct stat *out) noexcept {
  return static_cast<int>(syscall(SYS_fstat, descriptor, out));
}
__attribute__((visibility("hidden"))) int fstat64(int descriptor, struct stat64 *out) noexcept {
  return static_cast<int>(syscall(SYS_fstat, descriptor, out));
}
}
#endif

#if __GLIBC_PREREQ(2, 35)
namespace {

struct Search {
  uintptr_t address;
  dl_find_object *out;
};

// Whether an object has the address; then `out` is what the unwinder needs of it.
int look(dl_phdr_info *object, size_t, void *data) {
  const auto &search = *static_cast<Search *>(data);
  const ElfW(Phdr) *code = nullptr;
  const ElfW(Phdr) *frames = nullptr;
  uintptr_t first = UINTPTR_MAX;
  uintptr_t end = 0;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr) &header = object->dlpi_phdr[i];
    if (header.p_type == PT_GNU_EH_FRAME) frames = &header;
    if (header.p_type != PT_LOAD) continue;
    const uintptr_t begin = object->dlpi_addr + header.p_vaddr;
    if (search.address - begin < header.p_memsz) code = &header;
    if (begin < first) first = begin;
    if (begin + header.p_memsz > end) end = begin + header.p_memsz;
  }
  if (code == nullptr) return 0;
  if (frames == nullptr) return -1;
  search.out->dlfo_map_start = reinterpret_cast<void *>(first);
  search.out->dlfo_map_end = reinterpret_cast<void *>(end);
  search.out->dlfo_eh_frame = reinterpret_cast<void *>(object->dlpi_addr + frames->p_vaddr);
  return 1;
}

}  // namespace

// How the unwinder finds the tables of a function: by the list of objects, as it did before 2.35.
extern "C" __attribute__((visibility("hidden"))) int _dl_find_object(void *address, dl_find_object *result) noexcept {
  *result = {};
  Search search{reinterpret_cast<uintptr_t>(address), result};
  return dl_iterate_phdr(look, &search) == 1 ? 0 : -1;
}
#endif
