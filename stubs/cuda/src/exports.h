// SPDX-License-Identifier: Apache-2.0
//
// Exported calls that cuda.h does not declare: older versions, and per-thread variants.
#ifndef SOFTCUDA_EXPORTS_H
#define SOFTCUDA_EXPORTS_H

#include "api.h"

SOFTCUDA_API cuStreamBeginCapture(CUstream hStream);
SOFTCUDA_API cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out);
SOFTCUDA_API cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
                                       CUgraph *graph_out, const CUgraphNode **dependencies_out,
                                       size_t *numDependencies_out);
SOFTCUDA_API cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode *dependencies, size_t numDependencies,
                                               unsigned int flags);
SOFTCUDA_API cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev);
SOFTCUDA_API cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *, int numParams, unsigned int flags, CUdevice dev);
SOFTCUDA_API cuDeviceGetUuid(CUuuid *uuid, CUdevice dev);
SOFTCUDA_API cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd);
SOFTCUDA_API cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags);
SOFTCUDA_API cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges);
SOFTCUDA_API cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies);
SOFTCUDA_API cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode *dependentNodes, size_t *numDependentNodes);
SOFTCUDA_API cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                    size_t numDependencies);
SOFTCUDA_API cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                       size_t numDependencies);
SOFTCUDA_API cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
                                   size_t bufferSize);
SOFTCUDA_API cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                            const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams);
SOFTCUDA_API cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                  size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams);
SOFTCUDA_API cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams);
SOFTCUDA_API cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams);
SOFTCUDA_API cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                            size_t numDependencies, CUgraphNodeParams *nodeParams);
SOFTCUDA_API cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
                               CUgraphExecUpdateResult *updateResult_out);

SOFTCUDA_API cuStreamBeginCapture_v2_ptsz(CUstream hStream, CUstreamCaptureMode mode);
SOFTCUDA_API cuStreamBeginCapture_ptsz(CUstream hStream);
SOFTCUDA_API cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                              const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                              CUstreamCaptureMode mode);
SOFTCUDA_API cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph);
SOFTCUDA_API cuStreamGetCaptureInfo_ptsz(CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
                                         cuuint64_t *id_out);
SOFTCUDA_API cuStreamGetCaptureInfo_v2_ptsz(CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
                                            cuuint64_t *id_out, CUgraph *graph_out,
                                            const CUgraphNode **dependencies_out, size_t *numDependencies_out);
SOFTCUDA_API cuStreamGetCaptureInfo_v3_ptsz(CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
                                            cuuint64_t *id_out, CUgraph *graph_out,
                                            const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out,
                                            size_t *numDependencies_out);
SOFTCUDA_API cuStreamUpdateCaptureDependencies_ptsz(CUstream hStream, CUgraphNode *dependencies, size_t numDependencies,
                                                    unsigned int flags);
SOFTCUDA_API cuStreamUpdateCaptureDependencies_v2_ptsz(CUstream hStream, CUgraphNode *dependencies,
                                                       const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                       unsigned int flags);
SOFTCUDA_API cuMemcpy_ptds(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount);
SOFTCUDA_API cuMemcpyAsync_ptsz(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream);
SOFTCUDA_API cuMemcpyHtoD_v2_ptds(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount);
SOFTCUDA_API cuMemcpyDtoH_v2_ptds(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount);
SOFTCUDA_API cuMemcpyDtoD_v2_ptds(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount);
SOFTCUDA_API cuMemcpyHtoDAsync_v2_ptsz(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream);
SOFTCUDA_API cuMemcpyDtoHAsync_v2_ptsz(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream);
SOFTCUDA_API cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount,
                                       CUstream hStream);
SOFTCUDA_API cuMemcpyPeer_ptds(CUdeviceptr dstDevice, CUcontext, CUdeviceptr srcDevice, CUcontext, size_t ByteCount);
SOFTCUDA_API cuMemcpyPeerAsync_ptsz(CUdeviceptr dstDevice, CUcontext, CUdeviceptr srcDevice, CUcontext,
                                    size_t ByteCount, CUstream hStream);
SOFTCUDA_API cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *pCopy);
SOFTCUDA_API cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *pCopy);
SOFTCUDA_API cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *pCopy, CUstream hStream);
SOFTCUDA_API cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *pCopy);
SOFTCUDA_API cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *pCopy, CUstream hStream);
SOFTCUDA_API cuMemsetD8_v2_ptds(CUdeviceptr dstDevice, unsigned char uc, size_t N);
SOFTCUDA_API cuMemsetD16_v2_ptds(CUdeviceptr dstDevice, unsigned short us, size_t N);
SOFTCUDA_API cuMemsetD32_v2_ptds(CUdeviceptr dstDevice, unsigned int ui, size_t N);
SOFTCUDA_API cuMemsetD2D8_v2_ptds(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width,
                                  size_t Height);
SOFTCUDA_API cuMemsetD2D16_v2_ptds(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
                                   size_t Height);
SOFTCUDA_API cuMemsetD2D32_v2_ptds(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width,
                                   size_t Height);
SOFTCUDA_API cuMemsetD8Async_ptsz(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream);
SOFTCUDA_API cuMemsetD16Async_ptsz(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream);
SOFTCUDA_API cuMemsetD32Async_ptsz(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream);
SOFTCUDA_API cuMemsetD2D8Async_ptsz(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width,
                                    size_t Height, CUstream hStream);
SOFTCUDA_API cuMemsetD2D16Async_ptsz(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
                                     size_t Height, CUstream hStream);
SOFTCUDA_API cuMemsetD2D32Async_ptsz(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width,
                                     size_t Height, CUstream hStream);
SOFTCUDA_API cuEventRecord_ptsz(CUevent hEvent, CUstream hStream);
SOFTCUDA_API cuEventRecordWithFlags_ptsz(CUevent hEvent, CUstream hStream, unsigned int flags);
SOFTCUDA_API cuStreamWaitEvent_ptsz(CUstream hStream, CUevent hEvent, unsigned int Flags);
SOFTCUDA_API cuGraphInstantiateWithParams_ptsz(CUgraphExec *phGraphExec, CUgraph hGraph,
                                               CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams);
SOFTCUDA_API cuGraphUpload_ptsz(CUgraphExec hGraphExec, CUstream hStream);
SOFTCUDA_API cuGraphLaunch_ptsz(CUgraphExec hGraphExec, CUstream hStream);
SOFTCUDA_API cuLaunchKernel_ptsz(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                 unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                 unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra);
SOFTCUDA_API cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra);
SOFTCUDA_API cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                            unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
                                            unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                            void **kernelParams);
SOFTCUDA_API cuLaunchHostFunc_ptsz(CUstream hStream, CUhostFn fn, void *userData);
SOFTCUDA_API cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUstream hStream);
SOFTCUDA_API cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream);
SOFTCUDA_API cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream);
SOFTCUDA_API cuStreamQuery_ptsz(CUstream hStream);
SOFTCUDA_API cuStreamSynchronize_ptsz(CUstream hStream);
SOFTCUDA_API cuStreamGetPriority_ptsz(CUstream hStream, int *priority);
SOFTCUDA_API cuStreamGetFlags_ptsz(CUstream hStream, unsigned int *flags);
SOFTCUDA_API cuStreamGetId_ptsz(CUstream hStream, unsigned long long *streamId);
SOFTCUDA_API cuStreamGetDevice_ptsz(CUstream hStream, CUdevice *device);
SOFTCUDA_API cuStreamGetCtx_ptsz(CUstream hStream, CUcontext *pctx);
SOFTCUDA_API cuStreamGetCtx_v2_ptsz(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx);
SOFTCUDA_API cuStreamGetAttribute_ptsz(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value_out);
SOFTCUDA_API cuStreamSetAttribute_ptsz(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value);
SOFTCUDA_API cuStreamCopyAttributes_ptsz(CUstream dst, CUstream src);
SOFTCUDA_API cuStreamAddCallback_ptsz(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags);
SOFTCUDA_API cuStreamIsCapturing_ptsz(CUstream hStream, CUstreamCaptureStatus *captureStatus);
SOFTCUDA_API cuStreamWaitValue32_v2_ptsz(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags);
SOFTCUDA_API cuStreamWaitValue64_v2_ptsz(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags);
SOFTCUDA_API cuStreamWriteValue32_v2_ptsz(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags);
SOFTCUDA_API cuStreamWriteValue64_v2_ptsz(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags);
SOFTCUDA_API cuStreamBatchMemOp_v2_ptsz(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray,
                                        unsigned int flags);

#endif  // SOFTCUDA_EXPORTS_H
