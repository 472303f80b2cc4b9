// SPDX-License-Identifier: Apache-2.0
#ifndef NCCLSTUB_IMAGE_REDUCE_H
#define NCCLSTUB_IMAGE_REDUCE_H

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ncclstub/soft_state.h"

namespace ncclstub::soft {

// Reduces `count` elements of every input into `out`, in the order of the inputs, which is that of the ranks: every
// rank computes the same bits.  Integers are accumulated in 64 bits, wrapping; float16 and bfloat16 in float32 and
// rounded once; float32 and float64 in themselves.  An average is the sum divided by the number of inputs, integers
// toward zero, before the rounding.
void reduce(ncclDataType_t type, uint32_t reduction, std::byte *out, const std::vector<const std::byte *> &inputs,
            uint64_t count);

// Multiplies by the scalar whose bytes are in `scalar`, in the precision above, and rounds to the type.
void scale(ncclDataType_t type, uint64_t scalar, std::byte *out, const std::byte *in, uint64_t count);

}  // namespace ncclstub::soft

#endif  // NCCLSTUB_IMAGE_REDUCE_H
