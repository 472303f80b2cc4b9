// SPDX-License-Identifier: Apache-2.0
//
// What stands behind the exported names, one function each.
#ifndef NCCLSTUB_API_H
#define NCCLSTUB_API_H

#include "ncclstub/abi.h"

namespace ncclstub::api {

#define NCCL_FUNCTION(name, parameters, arguments) ncclResult_t name parameters;
#define NCCL_TEXT(name, parameters, arguments) const char *name parameters;
#define NCCL_REFUSED(kind, name)
#include "functions.def"
#undef NCCL_FUNCTION
#undef NCCL_TEXT
#undef NCCL_REFUSED

// Beside NCCL's own names: the true size and rank of a communicator.  The fake library cannot know what a split made
// and is told here; the soft one checks.  Exported as foundryd_nccl_declare.
ncclResult_t declare(ncclComm_t comm, int size, int rank);

}  // namespace ncclstub::api

#endif  // NCCLSTUB_API_H
