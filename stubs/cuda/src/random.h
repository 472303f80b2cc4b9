// SPDX-License-Identifier: Apache-2.0
//
// Everything in which one process may differ from another: addresses, the order of nodes, padding.
#ifndef SOFTCUDA_RANDOM_H
#define SOFTCUDA_RANDOM_H

#include <cstddef>
#include <cstdint>

namespace softcuda {

// SplitMix64: a bijection of 64-bit words in which every input bit reaches every output bit.
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// SOFTCUDA_SEED where it is set, else from the system.  Fixed for the process.
uint64_t seed();

// A fresh pseudo-random word of the process's sequence.  Thread-safe.
uint64_t draw();

// Where an object stands in the process's arbitrary order.
inline uint64_t shuffled_rank(uint64_t id) {
  return mix(seed() ^ mix(id));
}

// Fills a struct that goes to the caller with noise, so that nobody takes its padding for zero.
void scramble(void *data, size_t bytes);

}  // namespace softcuda

#endif  // SOFTCUDA_RANDOM_H
