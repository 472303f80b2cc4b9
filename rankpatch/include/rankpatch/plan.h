// SPDX-License-Identifier: Apache-2.0
//
// From rules to the writes of one rank.  Rules come out of files, so everything about them is checked.
#ifndef RANKPATCH_PLAN_H
#define RANKPATCH_PLAN_H

#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "rankpatch/rule.h"

namespace rankpatch {

// A rule, a write, a table or a coordinate says something impossible.
class InvalidRules : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

using Coordinates = std::array<uint32_t, FP_COORDINATE_COUNT>;

// Checks kind, width, coordinate and the reserved byte of every rule, the table entries of all `world` ranks, and that
// rules ascend by (block, offset) without overlap.  Throws InvalidRules that names the first bad rule.
void check_rules(std::span<const fp_rule> rules, uint64_t table_count, uint32_t world);

// The same for writes, whose values must fit their width.
void check_writes(std::span<const fp_write> writes);

// Number of writes that `plan` makes: every rule but noise gives one.
size_t count_writes(std::span<const fp_rule> rules);

// A coordinate that is not known: rules that follow it are refused.
inline constexpr uint32_t kUnknownCoordinate = UINT32_MAX;

// A rule follows a coordinate that is not known.
class UnknownCoordinate : public InvalidRules {
 public:
  using InvalidRules::InvalidRules;
};

// Checks as `check_rules` and fills `writes`, which has `count_writes` entries, in the order of the rules.  Throws
// InvalidRules, or UnknownCoordinate, which is one.
void plan(std::span<const fp_rule> rules, std::span<const uint64_t> tables, const Coordinates &coordinates,
          uint32_t world, std::span<fp_write> writes);

}  // namespace rankpatch

#endif  // RANKPATCH_PLAN_H
