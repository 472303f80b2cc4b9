// SPDX-License-Identifier: Apache-2.0
//
// memory.ptx for the software driver: the same rows, the same results, one call a row.  What the parameters mean is
// said there.
#include <cstring>

#include "softcuda/kernel.h"

SOFTCUDA_IMAGE()

namespace {

struct Chunk {
  uint64_t address, bytes;
};

struct Put {
  uint64_t to, from, bytes, word;
};

struct Judged {
  uint64_t after, plain, start, changed, bytes, start_word, changed_word, reserved;
};

template <class T>
T load(uint64_t address) {
  T out;
  std::memcpy(&out, reinterpret_cast<const void *>(address), sizeof out);
  return out;
}

template <class T>
void store(uint64_t address, T value) {
  std::memcpy(reinterpret_cast<void *>(address), &value, sizeof value);
}

// What put and judge go through one by one: words of 4 bytes, then the bytes behind them.
struct Item {
  uint64_t offset;
  uint64_t source;  // where a shift by a word takes it from
  bool whole;
  bool flips;  // the first byte of a word does
};

template <class Body>
void each_item(uint64_t bytes, bool shift, Body &&body) {
  const uint64_t end = bytes / 4 * 4;
  for (uint64_t at = 0; at < end; at += 4) body(Item{at, !shift ? at : (at == 0 ? end : at) - 4, true, true});
  for (uint64_t at = end; at < bytes; ++at) body(Item{at, at, false, at == end});
}

uint32_t fetch(uint64_t base, uint64_t word, uint64_t offset, bool whole) {
  if (base == 0) {
    const auto value = static_cast<uint32_t>(word >> (offset % 8 * 8));
    return whole ? value : value & 0xff;
  }
  return whole ? load<uint32_t>(base + offset) : load<uint8_t>(base + offset);
}

uint32_t nonzero_bytes(uint32_t value) {
  return ((value & 0x7f7f7f7f) + 0x7f7f7f7f) | value;
}

}  // namespace

SOFTCUDA_KERNEL(survey, const Chunk *rows, uint64_t *out, uint64_t low, uint64_t reach, uint32_t count) {
  const auto [address, bytes] = rows[blockIdx.x];
  const uint64_t whole = bytes / 8;
  const uint64_t mask = (uint64_t{1} << (bytes % 8 * 8)) - 1;
  const uint64_t first = load<uint64_t>(address) & (whole ? ~uint64_t{0} : mask);
  uint64_t sum = 0, mixed = 0;
  bool pointers = false;
  for (uint64_t i = 0; i < whole + (mask ? 1 : 0); ++i) {
    const uint64_t kept = i < whole ? ~uint64_t{0} : mask;
    const uint64_t word = load<uint64_t>(address + 8 * i) & kept;
    mixed |= word ^ (first & kept);
    pointers |= i < whole && word - low < reach;
    uint64_t x = ((i + 1) * 0x9e3779b97f4a7c15 + word) * 0xff51afd7ed558ccd;
    x = (x ^ (x >> 32)) * 0xc4ceb9fe1a85ec53;
    sum += x ^ (x >> 29);
  }
  uint64_t *slot = out + blockIdx.x;
  slot[0] = sum;
  if (mixed) slot[count] = 1;
  if (pointers) slot[2 * uint64_t{count}] = 1;
  slot[3 * uint64_t{count}] = first;
}

SOFTCUDA_KERNEL(put, const Put *rows, uint32_t shift, uint32_t flip) {
  const Put row = rows[blockIdx.x];
  if (row.from && !shift && !flip) {
    std::memcpy(reinterpret_cast<void *>(row.to), reinterpret_cast<const void *>(row.from), row.bytes);
    return;
  }
  each_item(row.bytes, shift != 0 && row.from != 0, [&](const Item &item) {
    uint32_t value = fetch(row.from, row.word, item.source, item.whole);
    if (row.from && item.flips) value ^= flip;
    if (item.whole) {
      store<uint32_t>(row.to + item.offset, value);
    } else {
      store<uint8_t>(row.to + item.offset, static_cast<uint8_t>(value));
    }
  });
}

SOFTCUDA_KERNEL(judge, const Judged *rows, uint64_t *out, uint32_t shift, uint32_t flip) {
  const Judged row = rows[blockIdx.x];
  each_item(row.bytes, shift != 0 && row.changed != 0, [&](const Item &item) {
    const uint32_t after = fetch(row.after, 0, item.offset, item.whole);
    const uint32_t start = fetch(row.start, row.start_word, item.offset, item.whole);
    const uint32_t plain = row.plain ? fetch(row.plain, 0, item.offset, item.whole) : start;
    uint32_t changed = fetch(row.changed, row.changed_word, item.source, item.whole);
    if (row.changed && item.flips) changed ^= flip;
    const uint32_t written = nonzero_bytes(plain ^ start) | nonzero_bytes(after ^ changed);
    if (nonzero_bytes(after ^ plain) & written & 0x80808080) *out = 1;
  });
}
