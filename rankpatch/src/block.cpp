// SPDX-License-Identifier: Apache-2.0
#include "rankpatch/block.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace rankpatch {

static_assert(std::endian::native == std::endian::little, "words are stored as this machine has them");

void expand(std::span<uint8_t> block, std::span<const std::span<const uint8_t>> base,
            std::span<const uint32_t> positions, std::span<const uint32_t> columns, size_t column_count,
            size_t column) {
  size_t bytes = 0;
  for (const auto piece : base) bytes += piece.size();
  if (block.size() != bytes) {
    throw std::invalid_argument("a block of " + std::to_string(block.size()) +
                                " bytes cannot take a member of a template of " + std::to_string(bytes));
  }
  if (column >= column_count) {
    throw std::invalid_argument("column " + std::to_string(column) + " is not one of " + std::to_string(column_count));
  }
  if (columns.size() / column_count != positions.size() || columns.size() % column_count != 0) {
    throw std::invalid_argument(std::to_string(positions.size()) + " positions do not go with " +
                                std::to_string(columns.size()) + " values in " + std::to_string(column_count) +
                                " columns");
  }
  uint32_t last = 0;
  for (const uint32_t position : positions) last = std::max(last, position);
  if (!positions.empty() && uint64_t{last} + 4 > block.size()) {
    throw std::invalid_argument("position " + std::to_string(last) + " is past the block of " +
                                std::to_string(block.size()) + " bytes");
  }
  uint8_t *end = block.data();
  for (const auto piece : base) {
    if (!piece.empty()) std::memmove(end, piece.data(), piece.size());
    end += piece.size();
  }
  for (size_t i = 0; i < positions.size(); ++i) {
    uint32_t word = 0;
    std::memcpy(&word, block.data() + positions[i], 4);
    word += columns[i * column_count + column];
    std::memcpy(block.data() + positions[i], &word, 4);
  }
}

void turn(std::span<uint32_t> out, std::span<const uint32_t> columns, size_t column_count, size_t first, size_t count) {
  if (first > column_count || count > column_count - first) {
    throw std::invalid_argument(std::to_string(count) + " columns from " + std::to_string(first) +
                                " on are not in a matrix of " + std::to_string(column_count));
  }
  const size_t rows = column_count == 0 ? 0 : columns.size() / column_count;
  if (rows * column_count != columns.size() || rows * count != out.size()) {
    throw std::invalid_argument(std::to_string(count) + " columns of " + std::to_string(rows) + " rows are not the " +
                                std::to_string(out.size()) + " words that there is room for");
  }
  constexpr size_t kStep = 16;  // rows at a time, so that each line of `out` is written at once
  for (size_t start = 0; start < rows; start += kStep) {
    const size_t end = std::min(start + kStep, rows);
    for (size_t c = 0; c < count; ++c)
      for (size_t row = start; row < end; ++row) out[c * rows + row] = columns[row * column_count + first + c];
  }
}

void apply(std::span<uint8_t> block, std::span<const fp_write> writes) {
  for (const fp_write &write : writes) {
    if (write.width != 1 && write.width != 2 && write.width != 4 && write.width != 8) {
      throw std::invalid_argument("a write has a width of " + std::to_string(write.width) + " bytes");
    }
    if (uint64_t{write.offset} + write.width > block.size()) {
      throw std::invalid_argument("a write of " + std::to_string(write.width) + " bytes at offset " +
                                  std::to_string(write.offset) + " is past block " + std::to_string(write.block) +
                                  " of " + std::to_string(block.size()) + " bytes");
    }
  }
  for (const fp_write &write : writes) {
    uint8_t *at = block.data() + write.offset;
    switch (write.width) {  // constant sizes, so that each store is one instruction
      case 1:
        std::memcpy(at, &write.value, 1);
        break;
      case 2:
        std::memcpy(at, &write.value, 2);
        break;
      case 4:
        std::memcpy(at, &write.value, 4);
        break;
      default:
        std::memcpy(at, &write.value, 8);
        break;
    }
  }
}

void relocate(std::span<uint8_t> block, std::span<const fp_relocation> relocations, std::span<const uint64_t> symbols) {
  for (const fp_relocation &relocation : relocations) {
    if (relocation.symbol >= symbols.size()) {
      throw std::invalid_argument("a relocation names symbol " + std::to_string(relocation.symbol) + " of " +
                                  std::to_string(symbols.size()));
    }
    if (uint64_t{relocation.offset} + 8 > block.size()) {
      throw std::invalid_argument("a relocation at offset " + std::to_string(relocation.offset) + " is past block " +
                                  std::to_string(relocation.block) + " of " + std::to_string(block.size()) + " bytes");
    }
  }
  for (const fp_relocation &relocation : relocations) {
    const uint64_t address = symbols[relocation.symbol] + static_cast<uint64_t>(relocation.addend);
    std::memcpy(block.data() + relocation.offset, &address, 8);
  }
}

std::vector<uint32_t> differing(std::span<const uint8_t> reference, std::span<const std::span<const uint8_t>> others,
                                uint32_t width) {
  if (width != 1 && width != 2 && width != 4 && width != 8) {
    throw std::invalid_argument("a word of " + std::to_string(width) + " bytes is not 1, 2, 4 or 8");
  }
  const size_t bytes = reference.size();
  if (bytes > uint64_t{UINT32_MAX} + 1) throw std::invalid_argument("a block is longer than 4 GiB");
  for (const auto &other : others) {
    if (other.size() != bytes) {
      throw std::invalid_argument("a block of " + std::to_string(other.size()) + " bytes is compared with one of " +
                                  std::to_string(bytes));
    }
  }
  std::vector<uint32_t> found;
  constexpr size_t kStep = 4096;  // memcmp skips what is equal, which is nearly everything
  for (size_t start = 0; start < bytes; start += kStep) {
    const size_t step = std::min(kStep, bytes - start);
    if (std::all_of(others.begin(), others.end(), [&](const auto &other) {
          return std::memcmp(reference.data() + start, other.data() + start, step) == 0;
        })) {
      continue;
    }
    for (size_t at = start; at < start + step; at += 8) {
      const size_t size = std::min<size_t>(8, bytes - at);
      uint64_t expected = 0;
      uint64_t changed = 0;
      std::memcpy(&expected, reference.data() + at, size);
      for (const auto &other : others) {
        uint64_t actual = 0;
        std::memcpy(&actual, other.data() + at, size);
        changed |= actual ^ expected;
      }
      const uint64_t mask = width == 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * width)) - 1;
      for (uint32_t byte = 0; changed != 0; byte += width) {
        if (changed & mask) found.push_back(static_cast<uint32_t>(at + byte));
        changed = width == 8 ? 0 : changed >> (8 * width);
      }
    }
  }
  return found;
}

}  // namespace rankpatch
