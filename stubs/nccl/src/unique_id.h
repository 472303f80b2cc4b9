// SPDX-License-Identifier: Apache-2.0
#ifndef NCCLSTUB_UNIQUE_ID_H
#define NCCLSTUB_UNIQUE_ID_H

#include <cstdint>

namespace ncclstub {

inline constexpr uint64_t kIdMagic = 0x3164692d6c63636e;  // "nccl-id1"

// The start of a unique id; the rest is zero.
struct IdContent {
  uint64_t magic = kIdMagic;
  uint8_t token[16] = {};
};

}  // namespace ncclstub

#endif  // NCCLSTUB_UNIQUE_ID_H
