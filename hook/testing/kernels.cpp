// SPDX-License-Identifier: Apache-2.0
//
// Small kernels whose effect shows what they were launched with and in which order they ran.
#include <cstdint>
#include <cstring>

#include "softcuda/kernel.h"

// Written by the host or by a kernel, to be found as changed.
SOFTCUDA_GLOBAL uint64_t counter = 5;
SOFTCUDA_GLOBAL uint32_t table[4] = {1, 2, 3, 4};
SOFTCUDA_GLOBAL uint8_t zeroed[64];
SOFTCUDA_GLOBAL uint32_t *aimed[2];

struct Block {
  uint64_t words[512];  // as large as a communication library's arguments
};

// Does not commute with itself: the result tells the order.
SOFTCUDA_KERNEL(mad, uint64_t *slot, uint64_t factor, uint64_t addend) {
  if (blockIdx.x == 0) *slot = *slot * factor + addend;
}

// Reads two slots, writes a third.
SOFTCUDA_KERNEL(join, const uint64_t *a, const uint64_t *b, uint64_t *out) {
  if (blockIdx.x == 0) *out = *a * 31 + *b;
}

// Parameters with gaps between them.
SOFTCUDA_KERNEL(gaps, uint8_t a, double b, uint16_t c, uint64_t *out) {
  if (blockIdx.x == 0) *out = *out * 7 + a + static_cast<uint64_t>(b) + c;
}

SOFTCUDA_KERNEL(sum_block, Block block, uint64_t *out) {
  if (blockIdx.x != 0) return;
  uint64_t sum = 0;
  for (const uint64_t word : block.words) sum = sum * 3 + word;
  *out = sum;
}

// The launch that the kernel sees.
SOFTCUDA_KERNEL(shape, uint32_t *out) {
  const softcuda::Launch &l = softcuda::launch();
  const uint32_t seen[] = {l.grid.x, l.grid.y, l.grid.z, l.block.x, l.block.y, l.block.z, l.shared_bytes};
  if (l.index.x == 0 && l.index.y == 0 && l.index.z == 0) std::memcpy(out, seen, sizeof seen);
}

// Through this instance's own global.
SOFTCUDA_KERNEL(count, uint64_t *out) {
  if (blockIdx.x == 0) *out = ++counter;
}

SOFTCUDA_KERNEL(touch) {
  if (blockIdx.x == 0) ++table[1];
}

// Another global's address in a global, as only device code puts it there.
SOFTCUDA_KERNEL(aim) {
  if (blockIdx.x == 0) aimed[1] = &table[1];
}

SOFTCUDA_KERNEL(follow, uint64_t *out) {
  if (blockIdx.x == 0) *out = aimed[1] == nullptr ? 0 : *aimed[1];
}

SOFTCUDA_IMAGE()
