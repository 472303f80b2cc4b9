// SPDX-License-Identifier: Apache-2.0
#include "modules/image.h"

#include <elf.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "modules/elf_view.h"

namespace foundryd::modules {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243B1;
constexpr uint32_t kContainerMagic = 0xBA55ED50;
constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

// __fatBinC_Wrapper_t of the CUDA toolchain.
struct Wrapper {
  uint32_t magic;
  uint32_t version;
  const void *data;
  const void *more;  // version 2: the containers that were linked ahead of time
};

struct ContainerHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t payload_bytes;
};

// The part of an entry's header that says what it is.
struct EntryHeader {
  uint16_t kind;
  uint16_t version;
  uint32_t header_bytes;
  uint64_t payload_bytes;
  uint32_t compressed_bytes;
  uint32_t options;
  uint16_t minor;
  uint16_t major;
  uint32_t architecture;
};
constexpr uint16_t kCompiled = 2;  // an ELF file

template <class T>
T load(const std::byte *at) {
  T out;
  std::memcpy(&out, at, sizeof out);
  return out;
}

size_t container_bytes(const std::byte *data, size_t limit) {
  if (limit < sizeof(ContainerHeader)) return 0;
  const auto header = load<ContainerHeader>(data);
  if (header.header_bytes < sizeof(ContainerHeader) || header.header_bytes > limit ||
      header.payload_bytes > limit - header.header_bytes)
    return 0;
  return header.header_bytes + header.payload_bytes;
}

bool looks_like_text(const std::byte *data, size_t limit) {
  for (size_t i = 0; i < 4 && i < limit; ++i) {
    const auto c = std::to_integer<unsigned char>(data[i]);
    if (c == 0) return i > 0;
    if (!(c == '\t' || c == '\n' || c == '\r' || (c >= 32 && c < 127))) return false;
  }
  return limit > 0;
}

Extent measure_within(const std::byte *data, size_t limit) {
  if (limit < sizeof(uint32_t)) return {};
  if (load<uint32_t>(data) == kContainerMagic) {
    const size_t bytes = container_bytes(data, limit);
    return bytes == 0 ? Extent{} : Extent{ImageKind::kFatbin, data, bytes};
  }
  if (std::memcmp(data, ELFMAG, SELFMAG) == 0) {
    const size_t bytes = elf_bytes(data, limit);
    return bytes == 0 ? Extent{} : Extent{ImageKind::kElf, data, bytes};
  }
  if (!looks_like_text(data, limit)) return {};
  const auto *text = reinterpret_cast<const char *>(data);
  const size_t length = limit == kNoLimit ? std::strlen(text) : strnlen(text, limit);
  return length == limit ? Extent{} : Extent{ImageKind::kPtx, data, length + 1};
}

}  // namespace

Extent measure(const void *image) {
  if (image == nullptr) return {};
  const auto *data = static_cast<const std::byte *>(image);
  if (load<uint32_t>(data) == kWrapperMagic) {
    const auto wrapper = load<Wrapper>(data);
    if (wrapper.version != 1) return {ImageKind::kManyContainers, data, 0};
    if (wrapper.data == nullptr) return {};
    data = static_cast<const std::byte *>(wrapper.data);
  }
  return measure_within(data, kNoLimit);
}

Extent measure_prefix(std::span<const std::byte> bytes) {
  return measure_within(bytes.data(), bytes.size());
}

Extent measure_exactly(std::span<const std::byte> image) {
  const Extent extent = measure_prefix(image);
  return extent.bytes == image.size() ? extent : Extent{};
}

bool may_be_compiled(const Extent &extent, unsigned architecture) {
  if (extent.kind != ImageKind::kFatbin) return extent.kind == ImageKind::kPtx;
  bool exact = false, other = false;
  for (size_t at = load<ContainerHeader>(extent.data).header_bytes; at < extent.bytes;) {
    if (extent.bytes - at < sizeof(EntryHeader)) return true;
    const auto entry = load<EntryHeader>(extent.data + at);
    const uint64_t room = extent.bytes - at;
    if (entry.header_bytes < sizeof entry || entry.header_bytes > room ||
        entry.payload_bytes > room - entry.header_bytes)
      return true;
    other |= entry.kind != kCompiled;
    exact |= entry.kind == kCompiled && entry.architecture == architecture;
    at += entry.header_bytes + entry.payload_bytes;
  }
  const char *always = std::getenv("CUDA_FORCE_PTX_JIT");
  return other && (!exact || (always != nullptr && *always != '\0' && std::strcmp(always, "0") != 0));
}

uint64_t content_hash(std::span<const std::byte> bytes) {
  uint64_t hash = 0x9e3779b97f4a7c15u ^ bytes.size();
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    hash = (hash ^ load<uint64_t>(bytes.data() + at)) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  for (; at < bytes.size(); ++at) hash = (hash ^ std::to_integer<uint64_t>(bytes[at])) * 0x100000001b3u;
  return hash ^ (hash >> 29);
}

std::string_view describe(ImageKind kind) {
  switch (kind) {
    case ImageKind::kFatbin:
      return "a fat binary";
    case ImageKind::kElf:
      return "an ELF image";
    case ImageKind::kPtx:
      return "PTX";
    case ImageKind::kManyContainers:
      return "a wrapper around several containers";
    case ImageKind::kUnknown:
      return "an image of an unknown kind";
  }
  return "an image of an unknown kind";
}

}  // namespace foundryd::modules
