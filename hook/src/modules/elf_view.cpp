// SPDX-License-Identifier: Apache-2.0
#include "modules/elf_view.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

namespace foundryd::modules {
namespace {

#ifndef EM_CUDA
constexpr uint16_t EM_CUDA = 190;
#endif

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

  std::string_view text(const Elf64_Shdr &strings, size_t offset) const {
    if (!fits(strings.sh_offset, strings.sh_size) || offset >= strings.sh_size) return {};
    const char *start = reinterpret_cast<const char *>(data_) + strings.sh_offset + offset;
    return {start, strnlen(start, strings.sh_size - offset)};
  }

  std::string_view section_name(size_t i) const {
    if (header_.e_shstrndx >= sections_) return {};
    return text(section(header_.e_shstrndx), section(i).sh_name);
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

// __constant__ memory is not marked writable in a cubin, but the host writes it.  Relocated read-only data of a host
// image is marked writable, but nobody writes it.
bool holds_variables(const ElfView &view, size_t section) {
  const std::string_view name = view.section_name(section);
  if (view.header().e_machine == EM_CUDA) return name.starts_with(".nv.global") || name == ".nv.constant3";
  return (view.section(section).sh_flags & SHF_WRITE) != 0 && !name.starts_with(".data.rel.ro");
}

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

bool collect_variables(std::span<const std::byte> file, std::vector<std::string> &names) {
  const auto view = ElfView::open(file.data(), file.size());
  if (!view) return false;
  bool found_table = false;
  for (size_t i = 0; i < view->sections(); ++i) {
    const Elf64_Shdr table = view->section(i);
    if (table.sh_type != SHT_SYMTAB && table.sh_type != SHT_DYNSYM) continue;
    if (table.sh_entsize != sizeof(Elf64_Sym) || !view->fits(table.sh_offset, table.sh_size) ||
        table.sh_link >= view->sections())
      return false;
    found_table = true;
    const Elf64_Shdr strings = view->section(table.sh_link);
    for (size_t k = 0; k < table.sh_size / sizeof(Elf64_Sym); ++k) {
      const auto symbol = view->at<Elf64_Sym>(table.sh_offset + k * sizeof(Elf64_Sym));
      if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || symbol.st_size == 0 || symbol.st_shndx == SHN_UNDEF ||
          symbol.st_shndx >= view->sections() || !holds_variables(*view, symbol.st_shndx))
        continue;
      const std::string_view name = view->text(strings, symbol.st_name);
      if (!name.empty()) names.emplace_back(name);
    }
  }
  return found_table;
}

}  // namespace foundryd::modules
