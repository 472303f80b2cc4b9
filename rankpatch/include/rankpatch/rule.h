// SPDX-License-Identifier: Apache-2.0
//
// Plain structs of the rank patching core.  Exposed to Python as NumPy dtypes by the bindings, stored in archives
// as they are.  A *block* is any run of bytes that a rank must reproduce: the nodes and parameters of a member, the
// list of communication ops, the content of a range, the bytes of a global.
#ifndef RANKPATCH_RULE_H
#define RANKPATCH_RULE_H

#include <stdint.h>

typedef enum fp_rule_kind {
  FP_RULE_AFFINE = 0,  // base + stride * coordinate
  FP_RULE_TABLE = 1,   // tables[table + rank]
  FP_RULE_NOISE = 2,   // differs between two captures of the same rank; the reference bytes stay
  FP_RULE_WORLD = 3    // base + stride * world size
} fp_rule_kind;

typedef enum fp_coordinate {
  FP_COORDINATE_RANK = 0,
  FP_COORDINATE_LOCAL_RANK = 1,
  FP_COORDINATE_TP = 2,
  FP_COORDINATE_EP = 3,
  FP_COORDINATE_DP = 4,
  FP_COORDINATE_PP = 5,
  FP_COORDINATE_COUNT = 6
} fp_coordinate;

// How one word of one block follows the rank.  Arithmetic is modulo 2^(8 * width).
typedef struct fp_rule {
  uint32_t block;
  uint32_t offset;     // bytes from the start of the block
  uint8_t width;       // 1, 2, 4 or 8
  uint8_t kind;        // fp_rule_kind
  uint8_t coordinate;  // fp_coordinate
  uint8_t reserved;
  uint32_t table;  // first entry of this rule in the table array
  int64_t base;
  int64_t stride;
} fp_rule;

// A rule worked out for one rank.
typedef struct fp_write {
  uint32_t block;
  uint32_t offset;
  uint32_t width;
  uint32_t reserved;
  uint64_t value;
} fp_write;

// A word that holds the address of a module's global plus `addend`: known only in the process that runs.
typedef struct fp_relocation {
  uint32_t block;
  uint32_t offset;
  uint32_t symbol;  // index in the variant's symbol list
  uint32_t reserved;
  int64_t addend;
} fp_relocation;

#endif  // RANKPATCH_RULE_H
