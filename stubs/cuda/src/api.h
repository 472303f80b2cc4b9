// SPDX-License-Identifier: Apache-2.0
//
// cuda.h as the driver sees it: every declaration exported, and no macro over a name of which an older version is
// exported too.
#ifndef SOFTCUDA_API_H
#define SOFTCUDA_API_H

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#undef cuCtxCreate
#undef cuDeviceGetUuid
#undef cuEventElapsedTime
#undef cuGetProcAddress
#undef cuGraphAddDependencies
#undef cuGraphAddKernelNode
#undef cuGraphAddNode
#undef cuGraphExecKernelNodeSetParams
#undef cuGraphExecUpdate
#undef cuGraphGetEdges
#undef cuGraphInstantiate
#undef cuGraphKernelNodeGetParams
#undef cuGraphKernelNodeSetParams
#undef cuGraphNodeGetDependencies
#undef cuGraphNodeGetDependentNodes
#undef cuGraphRemoveDependencies
#undef cuIpcOpenMemHandle
#undef cuMemHostRegister
#undef cuStreamBeginCapture
#undef cuStreamGetCaptureInfo
#undef cuStreamUpdateCaptureDependencies

#define SOFTCUDA_API extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI

#endif  // SOFTCUDA_API_H
