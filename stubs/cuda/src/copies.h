// SPDX-License-Identifier: Apache-2.0
//
// Copies and fills of linear memory: checked when they are submitted, done when their turn comes.
#ifndef SOFTCUDA_COPIES_H
#define SOFTCUDA_COPIES_H

#include "process.h"
#include "queue.h"
#include "stream.h"

namespace softcuda {

// Whether there is nothing to copy.
bool empty(const CUDA_MEMCPY3D &copy);

// Fails for arrays, for device addresses that the driver does not know, and for impossible shapes.
void check_copy(const CUDA_MEMCPY3D &copy);
void run_copy(const CUDA_MEMCPY3D &copy);

void check_fill(const CUDA_MEMSET_NODE_PARAMS &fill);
void run_fill(const CUDA_MEMSET_NODE_PARAMS &fill);

// A one-dimensional copy as the driver describes it in a node.
CUDA_MEMCPY3D linear_copy(CUmemorytype to_type, uint64_t to, CUmemorytype from_type, uint64_t from, size_t bytes);

}  // namespace softcuda

#endif  // SOFTCUDA_COPIES_H
