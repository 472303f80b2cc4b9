// SPDX-License-Identifier: Apache-2.0
#ifndef NCCLSTUB_IMAGE_TRANSPORT_H
#define NCCLSTUB_IMAGE_TRANSPORT_H

#include "ncclstub/soft_state.h"

namespace ncclstub::soft {

// Thrown inside the kernel.  Stopped ends it quietly, as an abort ends NCCL's kernels; Failed goes on to the driver,
// which turns it into CUDA_ERROR_LAUNCH_FAILED.  The communicator has the error already.
struct Stopped {};
struct Failed {};

void run_collective(CommState &state, const Op &op);

// All sends and receives of a group make progress together.
void run_point_to_point(CommState &state, const Op *ops, uint32_t count);

}  // namespace ncclstub::soft

#endif  // NCCLSTUB_IMAGE_TRANSPORT_H
