// SPDX-License-Identifier: Apache-2.0
#ifndef NCCLSTUB_OP_H
#define NCCLSTUB_OP_H

#include <cstdint>

#include "ncclstub/abi.h"

namespace ncclstub {

enum class OpKind : uint32_t {
  all_reduce,
  reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  broadcast,
  gather,
  scatter,
  send,
  recv,
};

inline bool is_point_to_point(OpKind kind) {
  return kind == OpKind::send || kind == OpKind::recv;
}

inline bool is_reduction(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::reduce_scatter;
}

inline const char *op_name(OpKind kind) {
  constexpr const char *names[] = {"all-reduce", "reduce", "reduce-scatter", "all-gather", "all-to-all",
                                   "broadcast",  "gather", "scatter",        "send",       "recv"};
  return names[static_cast<uint32_t>(kind)];
}

inline uint64_t type_bytes(ncclDataType_t type) {
  constexpr uint64_t bytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}

}  // namespace ncclstub

#endif  // NCCLSTUB_OP_H
