// SPDX-License-Identifier: Apache-2.0
#include "image.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "lz4.h"

#undef blockIdx
#undef gridDim
#undef threadIdx
#undef blockDim

namespace softcuda {

namespace {

constexpr uint32_t kWrapperMagic = 0x466243b1;
constexpr uint32_t kContainerMagic = 0xba55ed50;
constexpr uint16_t kEntryPtx = 1;
constexpr uint16_t kEntryElf = 2;
constexpr uint64_t kFlagLz4 = 0x2000;
constexpr uint64_t kFlagZstd = 0x8000;
constexpr uint32_t kArchitecture = 90;
constexpr uint64_t kLargestImage = uint64_t{1} << 32;

struct Wrapper {
  uint32_t magic;
  uint32_t version;
  const void *container;
  const void *file_name;
};

struct ContainerHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t bytes;  // of all entries
};

struct EntryHeader {
  uint16_t kind;
  uint16_t version;
  uint32_t header_bytes;
  uint64_t bytes;  // of the payload, padding included
  uint32_t compressed_bytes;
  uint32_t options_offset;
  uint16_t minor;
  uint16_t major;
  uint32_t architecture;
  uint32_t name_offset;
  uint32_t name_bytes;
  uint64_t flags;
  uint64_t reserved;
  uint64_t uncompressed_bytes;
};
static_assert(sizeof(EntryHeader) == 64);

template <class T>
T read(const std::byte *from) {
  T out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

bool starts_elf(const std::byte *data) {
  return std::memcmp(data, ELFMAG, SELFMAG) == 0;
}

// An object's size is nowhere written down: it ends with its last table or section.
uint64_t elf_bytes(const std::byte *data) {
  const auto header = read<Elf64_Ehdr>(data);
  require(header.e_ident[EI_CLASS] == ELFCLASS64, CUDA_ERROR_INVALID_IMAGE);
  require(header.e_machine == EM_X86_64 && header.e_type == ET_DYN, CUDA_ERROR_NO_BINARY_FOR_GPU);
  uint64_t end = header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize;
  for (unsigned i = 0; i < header.e_phnum; ++i) {
    const auto segment = read<Elf64_Phdr>(data + header.e_phoff + uint64_t{i} * header.e_phentsize);
    end = std::max(end, segment.p_offset + segment.p_filesz);
  }
  require(end <= kLargestImage, CUDA_ERROR_INVALID_IMAGE);
  return end;
}

std::vector<ImageGlobal> read_globals(const std::vector<std::byte> &elf) {
  std::vector<ImageGlobal> out;
  const auto inside = [&](uint64_t offset, uint64_t bytes) {
    return offset <= elf.size() && bytes <= elf.size() - offset;
  };
  const auto header = read<Elf64_Ehdr>(elf.data());
  std::vector<Elf64_Shdr> sections;
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    const uint64_t at = header.e_shoff + uint64_t{i} * sizeof(Elf64_Shdr);
    require(inside(at, sizeof(Elf64_Shdr)), CUDA_ERROR_INVALID_IMAGE);
    sections.push_back(read<Elf64_Shdr>(elf.data() + at));
  }
  for (const Elf64_Shdr &section : sections) {
    if (section.sh_type != SHT_DYNSYM) continue;
    require(section.sh_link < sections.size(), CUDA_ERROR_INVALID_IMAGE);
    const Elf64_Shdr &strings = sections[section.sh_link];
    require(
        inside(section.sh_offset, section.sh_size) && inside(strings.sh_offset, strings.sh_size) && strings.sh_size > 0,
        CUDA_ERROR_INVALID_IMAGE);
    for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= section.sh_size; at += sizeof(Elf64_Sym)) {
      const auto symbol = read<Elf64_Sym>(elf.data() + section.sh_offset + at);
      if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || symbol.st_shndx == SHN_UNDEF) continue;
      require(symbol.st_name < strings.sh_size, CUDA_ERROR_INVALID_IMAGE);
      const auto *name = reinterpret_cast<const char *>(elf.data() + strings.sh_offset + symbol.st_name);
      std::string text(name, strnlen(name, strings.sh_size - symbol.st_name));
      if (text != "softcuda_image_table") out.push_back({std::move(text), symbol.st_value, symbol.st_size});
    }
  }
  return out;
}

std::shared_ptr<const Image> from_elf(const std::byte *data, uint64_t most) {
  require(most >= sizeof(Elf64_Ehdr) && starts_elf(data), CUDA_ERROR_INVALID_IMAGE);
  const uint64_t bytes = elf_bytes(data);
  require(bytes <= most, CUDA_ERROR_INVALID_IMAGE);
  auto image = std::make_shared<Image>();
  image->elf.assign(data, data + bytes);
  image->globals = read_globals(image->elf);
  return image;
}

std::shared_ptr<const Image> from_container(const std::byte *data) {
  const auto header = read<ContainerHeader>(data);
  require(header.version == 1 && header.header_bytes >= sizeof header && header.bytes <= kLargestImage,
          CUDA_ERROR_INVALID_IMAGE);
  bool ptx = false;
  for (uint64_t at = 0; at < header.bytes;) {
    require(header.bytes - at >= sizeof(EntryHeader), CUDA_ERROR_INVALID_IMAGE);
    const std::byte *place = data + header.header_bytes + at;
    const auto entry = read<EntryHeader>(place);
    require(entry.header_bytes >= sizeof entry && entry.header_bytes <= header.bytes - at &&
                entry.bytes <= header.bytes - at - entry.header_bytes,
            CUDA_ERROR_INVALID_IMAGE);
    if (entry.kind == kEntryElf && entry.architecture == kArchitecture && (entry.flags & kFlagZstd) == 0) {
      const std::byte *payload = place + entry.header_bytes;
      if ((entry.flags & kFlagLz4) == 0) return from_elf(payload, entry.bytes);
      require(entry.compressed_bytes <= entry.bytes && entry.uncompressed_bytes <= kLargestImage,
              CUDA_ERROR_INVALID_IMAGE);
      const auto elf = decode_lz4({payload, entry.compressed_bytes}, entry.uncompressed_bytes);
      return from_elf(elf.data(), elf.size());
    }
    ptx = ptx || entry.kind == kEntryPtx;
    at += entry.header_bytes + entry.bytes;
  }
  throw Failure{ptx ? CUDA_ERROR_JIT_COMPILER_NOT_FOUND : CUDA_ERROR_NO_BINARY_FOR_GPU};
}

}  // namespace

std::shared_ptr<const Image> read_image(const void *data) {
  require(data != nullptr);
  const auto *bytes = static_cast<const std::byte *>(data);
  const auto magic = read<uint32_t>(bytes);
  if (magic == kWrapperMagic) {
    const auto wrapper = read<Wrapper>(bytes);
    require(wrapper.version == 1 && wrapper.container != nullptr, CUDA_ERROR_INVALID_IMAGE);
    const auto *container = static_cast<const std::byte *>(wrapper.container);
    require(read<uint32_t>(container) == kContainerMagic, CUDA_ERROR_INVALID_IMAGE);
    return from_container(container);
  }
  if (magic == kContainerMagic) return from_container(bytes);
  if (starts_elf(bytes)) return from_elf(bytes, elf_bytes(bytes));
  const auto *text = reinterpret_cast<const char *>(bytes);
  while (*text == '\n' || *text == ' ' || *text == '\t') ++text;
  const bool ptx = std::strncmp(text, "//", 2) == 0 || std::strncmp(text, ".version", 8) == 0;
  throw Failure{ptx ? CUDA_ERROR_JIT_COMPILER_NOT_FOUND : CUDA_ERROR_INVALID_IMAGE};
}

std::shared_ptr<const Image> read_image_file(const char *path) {
  require(path != nullptr);
  std::ifstream file(path, std::ios::binary);
  require(file.good(), CUDA_ERROR_FILE_NOT_FOUND);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  require(bytes.size() >= sizeof(ContainerHeader), CUDA_ERROR_INVALID_IMAGE);
  if (read<uint32_t>(reinterpret_cast<const std::byte *>(bytes.data())) == kContainerMagic) {
    const auto header = read<ContainerHeader>(reinterpret_cast<const std::byte *>(bytes.data()));
    require(header.header_bytes <= bytes.size() && header.bytes <= bytes.size() - header.header_bytes,
            CUDA_ERROR_INVALID_IMAGE);
  } else {
    require(bytes.size() >= sizeof(Elf64_Ehdr), CUDA_ERROR_INVALID_IMAGE);
  }
  bytes.push_back('\0');
  return read_image(bytes.data());
}

Instance::Instance(const Image &image) : file_(memfd_create("softcuda-image", MFD_CLOEXEC)) {
  require(file_ >= 0, CUDA_ERROR_OPERATING_SYSTEM);
  const std::byte *from = image.elf.data();
  for (size_t left = image.elf.size(); left > 0;) {
    const ssize_t n = write(file_, from, left);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      close(file_);
      throw Failure{CUDA_ERROR_OUT_OF_MEMORY};
    }
    from += n;
    left -= static_cast<size_t>(n);
  }
  // Each load has a file, and so a set of variables, of its own.  The descriptor stays open while the image is
  // loaded: the loader knows objects by path, and a reused number would name the older one.
  const std::string path = "/proc/self/fd/" + std::to_string(file_);
  object_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (object_ != nullptr) table_ = static_cast<const ImageTable *>(dlsym(object_, "softcuda_image_table"));
  link_map *map = nullptr;
  const bool mapped = object_ != nullptr && dlinfo(object_, RTLD_DI_LINKMAP, &map) == 0;
  if (table_ == nullptr || table_->abi != kImageAbi || !mapped) {
    if (object_ != nullptr) dlclose(object_);
    close(file_);
    throw Failure{CUDA_ERROR_INVALID_IMAGE};
  }
  base_ = map->l_addr;
}

Instance::~Instance() {
  dlclose(object_);
  close(file_);
}

}  // namespace softcuda
