// SPDX-License-Identifier: Apache-2.0
//
// The part of NCCL's C interface that the hook names.  It never changed between the supported versions (2.18 on), and
// the hook does not link NCCL, so no header of it is needed.
#ifndef FOUNDRYD_COMM_NCCL_H
#define FOUNDRYD_COMM_NCCL_H

#include <cuda.h>

#include <cstddef>

namespace foundryd::comm {

using NcclResult = int;  // ncclResult_t
inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclInProgress = 7;

struct NcclUniqueId {
  char internal[128];
};

using NcclComm = struct ncclComm *;
using NcclConfig = void;  // passed through
using NcclDataType = int;
using NcclRedOp = int;

inline constexpr NcclDataType kNcclDataTypes = 12;  // int8 ... float8e5m2

}  // namespace foundryd::comm

#endif  // FOUNDRYD_COMM_NCCL_H
