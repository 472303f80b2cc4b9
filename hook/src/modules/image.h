// SPDX-License-Identifier: Apache-2.0
//
// What a module image is, and how large exactly one of them is.
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

// The image that `bytes` begin with, whatever follows it.
Extent measure_prefix(std::span<const std::byte> bytes);

// Whether a driver may have to compile something of this image for a device of this architecture (90 for sm_90), so
// that options of the compiler count: PTX, and a container without code for exactly that architecture.
bool may_be_compiled(const Extent &extent, unsigned architecture);

uint64_t content_hash(std::span<const std::byte> bytes);

std::string_view describe(ImageKind kind);

}  // namespace foundryd::modules

#endif  // FOUNDRYD_MODULES_IMAGE_H
