// SPDX-License-Identifier: Apache-2.0
//
// From the structs of the API to a node's work, and back.
#ifndef SOFTCUDA_NODE_PARAMS_H
#define SOFTCUDA_NODE_PARAMS_H

#include "graph.h"

namespace softcuda {

KernelWork read_kernel(const CUDA_KERNEL_NODE_PARAMS_v2 &params);
void write_kernel(const KernelWork &work, CUDA_KERNEL_NODE_PARAMS_v2 *out);
CopyWork read_copy(const CUDA_MEMCPY3D &params, CUcontext context);
FillWork read_fill(const CUDA_MEMSET_NODE_PARAMS &params, CUcontext context);
HostWork read_host(const CUDA_HOST_NODE_PARAMS &params);
ChildWork read_child(CUgraph graph, const Graph *parent, CUgraphChildGraphNodeOwnership ownership);
WaitWork read_wait(CUevent event);
RecordWork read_record(CUevent event);
BatchWork read_batch(const CUDA_BATCH_MEM_OP_NODE_PARAMS &params);

// The work that generic parameters describe; fills what the struct gives back.  `current` is the work that it
// replaces, null for a new node.
Work read_work(CUgraphNodeParams &params, const Graph *graph, const Work *current);

// Replaces a node's work.
void set_work(Node &node, Work work);

}  // namespace softcuda

#endif  // SOFTCUDA_NODE_PARAMS_H
