// SPDX-License-Identifier: Apache-2.0
//
// LZ4 blocks, as compressed entries of containers hold them.
#ifndef SOFTCUDA_LZ4_H
#define SOFTCUDA_LZ4_H

#include <cstddef>
#include <span>
#include <vector>

namespace softcuda {

// The `bytes` bytes that a block stands for.  Throws Failure INVALID_IMAGE if it does not stand for as many.
std::vector<std::byte> decode_lz4(std::span<const std::byte> block, size_t bytes);

}  // namespace softcuda

#endif  // SOFTCUDA_LZ4_H
