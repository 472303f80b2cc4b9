// SPDX-License-Identifier: Apache-2.0
#include "random.h"

#include <sys/random.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace softcuda {

namespace {

uint64_t first_seed() {
  if (const char *text = std::getenv("SOFTCUDA_SEED"); text != nullptr && *text != '\0') {
    return mix(std::strtoull(text, nullptr, 0));
  }
  uint64_t word = 0;
  if (getrandom(&word, sizeof word, GRND_NONBLOCK) != static_cast<ssize_t>(sizeof word)) {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    word = mix(static_cast<uint64_t>(now.tv_nsec) ^ static_cast<uint64_t>(now.tv_sec) << 32);
  }
  return word;
}

}  // namespace

uint64_t seed() {
  static const uint64_t value = first_seed();
  return value;
}

uint64_t draw() {
  static std::atomic<uint64_t> counter{0};
  return mix(seed() + counter.fetch_add(1, std::memory_order_relaxed) * 0xd1342543de82ef95u);
}

void scramble(void *data, size_t bytes) {
  auto *out = static_cast<unsigned char *>(data);
  while (bytes > 0) {
    const uint64_t word = draw();
    const size_t n = bytes < sizeof word ? bytes : sizeof word;
    std::memcpy(out, &word, n);
    out += n;
    bytes -= n;
  }
}

}  // namespace softcuda
