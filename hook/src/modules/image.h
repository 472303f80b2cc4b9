// SPDX-License-Identifier: Apache-2.0
//
// What a module image is, how large exactly one of them is, and which globals it names.
#ifndef FOUNDRYD_MODULES_IMAGE_H
#define FOUNDRYD_MODULES_IMAGE_H

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace foundryd::modules {

enum class ImageKind {
  kFatbin,          // one container, 0xBA55ED50
  kElf,             // a cubin
  kPtx,             // text; its terminating NUL is part of the image
  kManyContainers,  // a version 2 wrapper: several containers that the driver links
  kUnknown
};

struct Extent {
  ImageKind kind = ImageKind::kUnknown;
  const std::byte *data = nullptr;  // the container itself, behind a wrapper if there was one
  size_t bytes = 0;                 // 0 for kManyContainers and kUnknown
};

// Measures an image that the driver has accepted: sizes come from its own headers and nothing else bounds them.
// Exactly one container is counted: what lies behind it in the same section is another module's.
Extent measure(const void *image);

// The same for bytes from outside; kUnknown unless the image fills `image` exactly.
Extent measure_exactly(std::span<const std::byte> image);

struct GlobalNames {
  std::vector<std::string> names;  // sorted, each once
  bool complete = true;            // false if a part of the image is compressed or is not an ELF file
};

// The image that `bytes` begin with, whatever follows it.
Extent measure_prefix(std::span<const std::byte> bytes);

// Names of the variables in writable memory, from the symbol tables of the ELF files in the image.
GlobalNames global_names(std::span<const std::byte> image, ImageKind kind);

uint64_t content_hash(std::span<const std::byte> bytes);

std::string_view describe(ImageKind kind);

}  // namespace foundryd::modules

#endif  // FOUNDRYD_MODULES_IMAGE_H
