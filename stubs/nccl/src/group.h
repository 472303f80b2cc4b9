// SPDX-License-Identifier: Apache-2.0
//
// Groups: a thread's calls between ncclGroupStart and the outermost ncclGroupEnd.  A call outside of one is a group of
// its own.  Each communicator's tasks of a group become one launch.
#ifndef NCCLSTUB_GROUP_H
#define NCCLSTUB_GROUP_H

#include <functional>

#include "communicator.h"

namespace ncclstub {

ncclResult_t group_start();
ncclResult_t group_end();
// Ends the group and drops its tasks.
ncclResult_t group_drop();

// Remembers that a call of the open group, if there is one, failed: the group will launch nothing.  Returns `result`.
ncclResult_t group_failed(ncclResult_t result);

// A collective.  Its arguments have been checked.
ncclResult_t enqueue(ncclComm_t comm, const Task &task, CUstream stream);

// Work that reaches other ranks, such as init and split.  It runs at the end of the group, beside the group's other
// jobs, because they may be waiting for each other.
ncclResult_t enqueue_job(std::function<ncclResult_t()> job);

}  // namespace ncclstub

#endif  // NCCLSTUB_GROUP_H
