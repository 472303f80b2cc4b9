// SPDX-License-Identifier: Apache-2.0
#include "modules/elf_view.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace foundryd::modules {
namespace {

class ElfView {
 public:
  static std::optional<ElfView> open(const std::byte *data, size_t limit) {
    ElfView view(data, limit);
    if (!view.fits(0, sizeof(Elf64_Ehdr))) return std::nullopt;
    std::memcpy(&view.header_, data, sizeof view.header_);
    const Elf64_Ehdr &h = view.header_;
    if (std::memcmp(h.e_ident, ELFMAG, SELFMAG) != 0 || h.e_ident[EI_CLASS] != ELFCLASS64) return std::nullopt;
    view.sections_ = h.e_shoff == 0 ? 0 : h.e_shnum;
    if (h.e_shoff != 0 && h.e_shnum == 0) {  // more sections than the field can hold: the first one has the count
      if (!view.fits(h.e_shoff, sizeof(Elf64_Shdr))) return std::nullopt;
      view.sections_ = view.at<Elf64_Shdr>(h.e_shoff).sh_size;
    }
    if ((view.sections_ != 0 && h.e_shentsize != sizeof(Elf64_Shdr)) ||
        (h.e_phnum != 0 && h.e_phentsize != sizeof(Elf64_Phdr)) ||
        !view.array_fits(h.e_shoff, view.sections_, sizeof(Elf64_Shdr)) ||
        !view.array_fits(h.e_phoff, h.e_phnum, sizeof(Elf64_Phdr)))
      return std::nullopt;
    return view;
  }

  const Elf64_Ehdr &header() const { return header_; }
  size_t sections() const { return sections_; }
  Elf64_Shdr section(size_t i) const { return at<Elf64_Shdr>(header_.e_shoff + i * sizeof(Elf64_Shdr)); }
  Elf64_Phdr segment(size_t i) const { return at<Elf64_Phdr>(header_.e_phoff + i * sizeof(Elf64_Phdr)); }

  bool fits(size_t offset, size_t bytes) const { return offset <= limit_ && bytes <= limit_ - offset; }

  template <class T>
  T at(size_t offset) const {
    T out;
    std::memcpy(&out, data_ + offset, sizeof out);
    return out;
  }

 private:
  ElfView(const std::byte *data, size_t limit) : data_(data), limit_(limit) {}

  bool array_fits(size_t offset, size_t count, size_t each) const {
    return count == 0 || (count <= limit_ / each && fits(offset, count * each));
  }

  const std::byte *data_;
  size_t limit_;
  Elf64_Ehdr header_{};
  size_t sections_ = 0;
};

}  // namespace

size_t elf_bytes(const std::byte *data, size_t limit) {
  const auto view = ElfView::open(data, limit);
  if (!view) return 0;
  const Elf64_Ehdr &h = view->header();
  size_t end = std::max<size_t>(h.e_ehsize, sizeof(Elf64_Ehdr));
  const auto extend = [&](size_t offset, size_t bytes) {
    if (!view->fits(offset, bytes)) return false;
    end = std::max(end, offset + bytes);
    return true;
  };
  if (!extend(h.e_shoff, view->sections() * sizeof(Elf64_Shdr)) || !extend(h.e_phoff, h.e_phnum * sizeof(Elf64_Phdr)))
    return 0;
  for (size_t i = 0; i < view->sections(); ++i) {
    const Elf64_Shdr s = view->section(i);
    if (s.sh_type != SHT_NULL && s.sh_type != SHT_NOBITS && !extend(s.sh_offset, s.sh_size)) return 0;
  }
  for (size_t i = 0; i < h.e_phnum; ++i) {
    const Elf64_Phdr p = view->segment(i);
    if (!extend(p.p_offset, p.p_filesz)) return 0;
  }
  return end;
}

}  // namespace foundryd::modules
