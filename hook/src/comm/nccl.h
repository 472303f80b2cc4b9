// SPDX-License-Identifier: Apache-2.0
//
// The part of NCCL's C interface that the hook names.  It is the same in every supported version (2.18 on), and the
// hook links no NCCL, so no header of it is needed.
#ifndef FOUNDRYD_HOOK_COMM_NCCL_H
#define FOUNDRYD_HOOK_COMM_NCCL_H

#include <cstddef>

#include "support/cuda.h"

namespace foundryd::comm {

using NcclResult = int;  // ncclResult_t
inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclInProgress = 7;  // of a non-blocking communicator

// A result after which the call counts as made.
inline bool accepted(NcclResult result) {
  return result == kNcclSuccess || result == kNcclInProgress;
}

struct NcclUniqueId {  // passed by value
  char internal[128];
};

struct NcclCommunicator;
using NcclComm = NcclCommunicator *;

// Reductions from here on are made by the program (ncclRedOpCreatePreMulSum) and mean nothing in another process.
inline constexpr int kNcclPredefinedReductions = 5;

}  // namespace foundryd::comm

extern "C" {
using foundryd::comm::NcclComm;
using foundryd::comm::NcclResult;

// Overridden.
NcclResult ncclCommInitRank(NcclComm *, int, foundryd::comm::NcclUniqueId, int);
NcclResult ncclCommInitRankConfig(NcclComm *, int, foundryd::comm::NcclUniqueId, int, void *);
NcclResult ncclCommInitRankScalable(NcclComm *, int, int, int, foundryd::comm::NcclUniqueId *, void *);
NcclResult ncclCommInitAll(NcclComm *, int, const int *);
NcclResult ncclCommSplit(NcclComm, int, int, NcclComm *, void *);
NcclResult ncclCommShrink(NcclComm, int *, int, NcclComm *, void *, int);
NcclResult ncclCommFinalize(NcclComm);
NcclResult ncclCommDestroy(NcclComm);
NcclResult ncclCommAbort(NcclComm);
NcclResult ncclGroupStart();
NcclResult ncclGroupEnd();
NcclResult ncclGroupSimulateEnd(void *);
NcclResult ncclAllReduce(const void *, void *, size_t, int, int, NcclComm, CUstream);
NcclResult ncclAllGather(const void *, void *, size_t, int, NcclComm, CUstream);
NcclResult ncclReduceScatter(const void *, void *, size_t, int, int, NcclComm, CUstream);
NcclResult ncclBroadcast(const void *, void *, size_t, int, int, NcclComm, CUstream);
NcclResult ncclBcast(void *, size_t, int, int, NcclComm, CUstream);
NcclResult ncclReduce(const void *, void *, size_t, int, int, int, NcclComm, CUstream);
NcclResult ncclAlltoAll(const void *, void *, size_t, int, NcclComm, CUstream);
NcclResult ncclGather(const void *, void *, size_t, int, int, NcclComm, CUstream);
NcclResult ncclScatter(const void *, void *, size_t, int, int, NcclComm, CUstream);
NcclResult ncclSend(const void *, size_t, int, int, NcclComm, CUstream);
NcclResult ncclRecv(void *, size_t, int, int, NcclComm, CUstream);

// Only called.
NcclResult ncclCommCount(NcclComm, int *);
NcclResult ncclCommUserRank(NcclComm, int *);
NcclResult ncclCommGetAsyncError(NcclComm, NcclResult *);
}

#endif  // FOUNDRYD_HOOK_COMM_NCCL_H
