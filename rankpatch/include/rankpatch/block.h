// SPDX-License-Identifier: Apache-2.0
//
// What is done to the bytes of a block: making a member from its template, storing writes and addresses of globals,
// finding differences.
#ifndef RANKPATCH_BLOCK_H
#define RANKPATCH_BLOCK_H

#include <cstdint>
#include <span>
#include <vector>

#include "rankpatch/rule.h"

namespace rankpatch {

// Makes a member in `block`, whatever was in it: `base`, which are pieces one after another, and to the 4-byte words at
// `positions` is added, modulo 2^32, column `column` of the row-major matrix `columns` [positions][column_count].
// Throws std::invalid_argument before the first byte changes if a length or a position does not fit.
void expand(std::span<uint8_t> block, std::span<const std::span<const uint8_t>> base,
            std::span<const uint32_t> positions, std::span<const uint32_t> columns, size_t column_count, size_t column);

// Puts `count` columns from `first` on of the row-major matrix `columns` [rows][column_count] into `out` [count][rows],
// where each lies in one piece.  Throws std::invalid_argument before the first byte changes if a length does not fit or
// the matrix does not have them.
void turn(std::span<uint32_t> out, std::span<const uint32_t> columns, size_t column_count, size_t first, size_t count);

// Stores each write little-endian.  All bounds are checked before the first byte changes; the `block` field of the
// writes is the caller's business.  Throws std::invalid_argument.
void apply(std::span<uint8_t> block, std::span<const fp_write> writes);

// Stores the address of each relocation's symbol plus its addend.  As with `apply`, all is checked first, and `block`
// is the caller's business.  Throws std::invalid_argument.
void relocate(std::span<uint8_t> block, std::span<const fp_relocation> relocations, std::span<const uint64_t> symbols);

// Ascending offsets of the words of `width` bytes in which any of `others` differs from `reference`; the last word may
// be shorter.  All are equally long, at most 4 GiB.  Throws std::invalid_argument.
std::vector<uint32_t> differing(std::span<const uint8_t> reference, std::span<const std::span<const uint8_t>> others,
                                uint32_t width);

}  // namespace rankpatch

#endif  // RANKPATCH_BLOCK_H
