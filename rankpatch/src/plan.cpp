// SPDX-License-Identifier: Apache-2.0
#include "rankpatch/plan.h"

#include <algorithm>
#include <string>

namespace rankpatch {
namespace {

bool valid_width(uint32_t width) {
  return width == 1 || width == 2 || width == 4 || width == 8;
}

uint64_t truncate(uint64_t value, uint32_t width) {
  return width == 8 ? value : value & ((uint64_t{1} << (8 * width)) - 1);
}

[[noreturn]] void refuse(const char *what, size_t index, const std::string &reason) {
  throw InvalidRules(std::string(what) + " " + std::to_string(index) + " " + reason);
}

// Where the next word may begin.  Blocks ascend, words of a block ascend and do not overlap.
class Order {
 public:
  explicit Order(const char *what) : what_(what) {}

  void next(size_t index, uint32_t block, uint32_t offset, uint32_t width) {
    if (index > 0 && (block < block_ || (block == block_ && offset < end_))) {
      refuse(what_, index,
             "is at block " + std::to_string(block) + ", offset " + std::to_string(offset) +
                 ", which is not after the one before it, that ends at block " + std::to_string(block_) + ", offset " +
                 std::to_string(end_));
    }
    block_ = block;
    end_ = uint64_t{offset} + width;
    if (end_ > uint64_t{UINT32_MAX} + 1) refuse(what_, index, "ends past 4 GiB");
  }

 private:
  const char *what_;
  uint32_t block_ = 0;
  uint64_t end_ = 0;
};

void check_rule(const fp_rule &rule, size_t index, uint64_t table_count, uint32_t world) {
  if (!valid_width(rule.width)) refuse("rule", index, "has a width of " + std::to_string(rule.width) + " bytes");
  if (rule.reserved != 0) refuse("rule", index, "has its reserved byte set");
  switch (rule.kind) {
    case FP_RULE_AFFINE:
      if (rule.coordinate >= FP_COORDINATE_COUNT) {
        refuse("rule", index, "follows coordinate " + std::to_string(rule.coordinate) + ", which does not exist");
      }
      break;
    case FP_RULE_TABLE:
      if (uint64_t{rule.table} + world > table_count) {
        refuse("rule", index,
               "has its table at entry " + std::to_string(rule.table) + " for " + std::to_string(world) +
                   " ranks, but there are " + std::to_string(table_count) + " entries");
      }
      break;
    case FP_RULE_NOISE:
    case FP_RULE_WORLD:
      break;
    default:
      refuse("rule", index, "is of kind " + std::to_string(rule.kind) + ", which does not exist");
  }
}

}  // namespace

void check_rules(std::span<const fp_rule> rules, uint64_t table_count, uint32_t world) {
  Order order("rule");
  for (size_t i = 0; i < rules.size(); ++i) {
    check_rule(rules[i], i, table_count, world);
    order.next(i, rules[i].block, rules[i].offset, rules[i].width);
  }
}

void check_writes(std::span<const fp_write> writes) {
  Order order("write");
  for (size_t i = 0; i < writes.size(); ++i) {
    const fp_write &write = writes[i];
    if (!valid_width(write.width)) refuse("write", i, "has a width of " + std::to_string(write.width) + " bytes");
    if (write.reserved != 0) refuse("write", i, "has its reserved word set");
    if (truncate(write.value, write.width) != write.value) {
      refuse(
          "write", i,
          "has the value " + std::to_string(write.value) + ", too large for " + std::to_string(write.width) + " bytes");
    }
    order.next(i, write.block, write.offset, write.width);
  }
}

size_t count_writes(std::span<const fp_rule> rules) {
  return static_cast<size_t>(
      std::count_if(rules.begin(), rules.end(), [](const fp_rule &rule) { return rule.kind != FP_RULE_NOISE; }));
}

void plan(std::span<const fp_rule> rules, std::span<const uint64_t> tables, const Coordinates &coordinates,
          uint32_t world, std::span<fp_write> writes) {
  const uint32_t rank = coordinates[FP_COORDINATE_RANK];
  for (size_t i = 0; i < coordinates.size(); ++i) {
    if (coordinates[i] >= world && coordinates[i] != kUnknownCoordinate) {
      throw InvalidRules("coordinate " + std::to_string(i) + " is " + std::to_string(coordinates[i]) +
                         ", which is not below the world size " + std::to_string(world));
    }
  }
  if (rank == kUnknownCoordinate) throw InvalidRules("the rank itself is not known");
  if (writes.size() != count_writes(rules)) throw InvalidRules("the output does not have one write for each rule");
  Order order("rule");
  auto write = writes.begin();
  for (size_t i = 0; i < rules.size(); ++i) {
    const fp_rule &rule = rules[i];
    check_rule(rule, i, tables.size(), world);
    order.next(i, rule.block, rule.offset, rule.width);
    uint64_t value = 0;
    switch (rule.kind) {
      case FP_RULE_AFFINE:
        if (coordinates[rule.coordinate] == kUnknownCoordinate) {
          throw UnknownCoordinate("rule " + std::to_string(i) + " follows coordinate " +
                                  std::to_string(rule.coordinate) + ", which is not known");
        }
        value = static_cast<uint64_t>(rule.base) + static_cast<uint64_t>(rule.stride) * coordinates[rule.coordinate];
        break;
      case FP_RULE_TABLE:
        value = tables[rule.table + size_t{rank}];
        if (truncate(value, rule.width) != value) {
          refuse("rule", i, "has a table entry too large for " + std::to_string(rule.width) + " bytes");
        }
        break;
      case FP_RULE_WORLD:
        value = static_cast<uint64_t>(rule.base) + static_cast<uint64_t>(rule.stride) * world;
        break;
      default:
        continue;  // noise: the reference bytes stay
    }
    *write++ = fp_write{rule.block, rule.offset, rule.width, 0, truncate(value, rule.width)};
  }
}

}  // namespace rankpatch
