// SPDX-License-Identifier: Apache-2.0
#include "lz4.h"

#include "failure.h"

namespace softcuda {
namespace {

constexpr size_t kShortestMatch = 4;

class Block {
 public:
  explicit Block(std::span<const std::byte> bytes) : rest_(bytes) {}

  bool ended() const { return rest_.empty(); }

  std::span<const std::byte> take(size_t count) {
    require(count <= rest_.size(), CUDA_ERROR_INVALID_IMAGE);
    const auto out = rest_.first(count);
    rest_ = rest_.subspan(count);
    return out;
  }

  size_t byte() { return std::to_integer<size_t>(take(1)[0]); }

  // A length that starts with four bits of the token.
  size_t length(size_t nibble) {
    if (nibble < 15) return nibble;
    for (;;) {
      const size_t more = byte();
      nibble += more;
      if (more != 255) return nibble;
    }
  }

 private:
  std::span<const std::byte> rest_;
};

}  // namespace

std::vector<std::byte> decode_lz4(std::span<const std::byte> bytes, size_t size) {
  std::vector<std::byte> out;
  out.reserve(size);
  Block block(bytes);
  while (!block.ended()) {
    const size_t token = block.byte();
    const auto literals = block.take(block.length(token >> 4));
    require(literals.size() <= size - out.size(), CUDA_ERROR_INVALID_IMAGE);
    out.insert(out.end(), literals.begin(), literals.end());
    if (block.ended()) break;  // the last sequence has no match
    const size_t low = block.byte();
    const size_t distance = low | block.byte() << 8;
    const size_t count = block.length(token & 15) + kShortestMatch;
    require(distance > 0 && distance <= out.size() && count <= size - out.size(), CUDA_ERROR_INVALID_IMAGE);
    // A match may reach into what it writes.
    for (size_t i = 0; i < count; ++i) out.push_back(out[out.size() - distance]);
  }
  require(out.size() == size, CUDA_ERROR_INVALID_IMAGE);
  return out;
}

}  // namespace softcuda
