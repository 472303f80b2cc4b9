// SPDX-License-Identifier: Apache-2.0
//
// The per-thread variants: the same calls with the thread's own default stream in place of the null stream.
#include "exports.h"
#include "process.h"

namespace {

class PerThreadDefault {
 public:
  PerThreadDefault() { softcuda::this_thread().per_thread_default_stream = true; }
  ~PerThreadDefault() { softcuda::this_thread().per_thread_default_stream = before_; }
  PerThreadDefault(const PerThreadDefault &) = delete;
  PerThreadDefault &operator=(const PerThreadDefault &) = delete;

 private:
  bool before_ = softcuda::this_thread().per_thread_default_stream;
};

}  // namespace

SOFTCUDA_API cuStreamBeginCapture_v2_ptsz(CUstream hStream, CUstreamCaptureMode mode) {
  const PerThreadDefault scope;
  return cuStreamBeginCapture_v2(hStream, mode);
}

SOFTCUDA_API cuStreamBeginCapture_ptsz(CUstream hStream) {
  const PerThreadDefault scope;
  return cuStreamBeginCapture(hStream);
}

SOFTCUDA_API cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                              const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                              CUstreamCaptureMode mode) {
  const PerThreadDefault scope;
  return cuStreamBeginCaptureToGraph(hStream, hGraph, dependencies, dependencyData, numDependencies, mode);
}

SOFTCUDA_API cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph) {
  const PerThreadDefault scope;
  return cuStreamEndCapture(hStream, phGraph);
}

SOFTCUDA_API cuStreamGetCaptureInfo_ptsz(CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
                                         cuuint64_t *id_out) {
  const PerThreadDefault scope;
  return cuStreamGetCaptureInfo(hStream, captureStatus_out, id_out);
}

SOFTCUDA_API cuStreamGetCaptureInfo_v2_ptsz(CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
                                            cuuint64_t *id_out, CUgraph *graph_out,
                                            const CUgraphNode **dependencies_out, size_t *numDependencies_out) {
  const PerThreadDefault scope;
  return cuStreamGetCaptureInfo_v2(hStream, captureStatus_out, id_out, graph_out, dependencies_out,
                                   numDependencies_out);
}

SOFTCUDA_API cuStreamGetCaptureInfo_v3_ptsz(CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
                                            cuuint64_t *id_out, CUgraph *graph_out,
                                            const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out,
                                            size_t *numDependencies_out) {
  const PerThreadDefault scope;
  return cuStreamGetCaptureInfo_v3(hStream, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out,
                                   numDependencies_out);
}

SOFTCUDA_API cuStreamUpdateCaptureDependencies_ptsz(CUstream hStream, CUgraphNode *dependencies, size_t numDependencies,
                                                    unsigned int flags) {
  const PerThreadDefault scope;
  return cuStreamUpdateCaptureDependencies(hStream, dependencies, numDependencies, flags);
}

SOFTCUDA_API cuStreamUpdateCaptureDependencies_v2_ptsz(CUstream hStream, CUgraphNode *dependencies,
                                                       const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                       unsigned int flags) {
  const PerThreadDefault scope;
  return cuStreamUpdateCaptureDependencies_v2(hStream, dependencies, dependencyData, numDependencies, flags);
}

SOFTCUDA_API cuMemcpy_ptds(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
  const PerThreadDefault scope;
  return cuMemcpy(dst, src, ByteCount);
}

SOFTCUDA_API cuMemcpyAsync_ptsz(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemcpyAsync(dst, src, ByteCount, hStream);
}

SOFTCUDA_API cuMemcpyHtoD_v2_ptds(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount) {
  const PerThreadDefault scope;
  return cuMemcpyHtoD_v2(dstDevice, srcHost, ByteCount);
}

SOFTCUDA_API cuMemcpyDtoH_v2_ptds(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount) {
  const PerThreadDefault scope;
  return cuMemcpyDtoH_v2(dstHost, srcDevice, ByteCount);
}

SOFTCUDA_API cuMemcpyDtoD_v2_ptds(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
  const PerThreadDefault scope;
  return cuMemcpyDtoD_v2(dstDevice, srcDevice, ByteCount);
}

SOFTCUDA_API cuMemcpyHtoDAsync_v2_ptsz(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemcpyHtoDAsync_v2(dstDevice, srcHost, ByteCount, hStream);
}

SOFTCUDA_API cuMemcpyDtoHAsync_v2_ptsz(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemcpyDtoHAsync_v2(dstHost, srcDevice, ByteCount, hStream);
}

SOFTCUDA_API cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount,
                                       CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemcpyDtoDAsync_v2(dstDevice, srcDevice, ByteCount, hStream);
}

SOFTCUDA_API cuMemcpyPeer_ptds(CUdeviceptr dstDevice, CUcontext unnamed1, CUdeviceptr srcDevice, CUcontext unnamed3,
                               size_t ByteCount) {
  const PerThreadDefault scope;
  return cuMemcpyPeer(dstDevice, unnamed1, srcDevice, unnamed3, ByteCount);
}

SOFTCUDA_API cuMemcpyPeerAsync_ptsz(CUdeviceptr dstDevice, CUcontext unnamed1, CUdeviceptr srcDevice,
                                    CUcontext unnamed3, size_t ByteCount, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemcpyPeerAsync(dstDevice, unnamed1, srcDevice, unnamed3, ByteCount, hStream);
}

SOFTCUDA_API cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *pCopy) {
  const PerThreadDefault scope;
  return cuMemcpy2D_v2(pCopy);
}

SOFTCUDA_API cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *pCopy) {
  const PerThreadDefault scope;
  return cuMemcpy2DUnaligned_v2(pCopy);
}

SOFTCUDA_API cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *pCopy, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemcpy2DAsync_v2(pCopy, hStream);
}

SOFTCUDA_API cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *pCopy) {
  const PerThreadDefault scope;
  return cuMemcpy3D_v2(pCopy);
}

SOFTCUDA_API cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *pCopy, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemcpy3DAsync_v2(pCopy, hStream);
}

SOFTCUDA_API cuMemsetD8_v2_ptds(CUdeviceptr dstDevice, unsigned char uc, size_t N) {
  const PerThreadDefault scope;
  return cuMemsetD8_v2(dstDevice, uc, N);
}

SOFTCUDA_API cuMemsetD16_v2_ptds(CUdeviceptr dstDevice, unsigned short us, size_t N) {
  const PerThreadDefault scope;
  return cuMemsetD16_v2(dstDevice, us, N);
}

SOFTCUDA_API cuMemsetD32_v2_ptds(CUdeviceptr dstDevice, unsigned int ui, size_t N) {
  const PerThreadDefault scope;
  return cuMemsetD32_v2(dstDevice, ui, N);
}

SOFTCUDA_API cuMemsetD2D8_v2_ptds(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width,
                                  size_t Height) {
  const PerThreadDefault scope;
  return cuMemsetD2D8_v2(dstDevice, dstPitch, uc, Width, Height);
}

SOFTCUDA_API cuMemsetD2D16_v2_ptds(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
                                   size_t Height) {
  const PerThreadDefault scope;
  return cuMemsetD2D16_v2(dstDevice, dstPitch, us, Width, Height);
}

SOFTCUDA_API cuMemsetD2D32_v2_ptds(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width,
                                   size_t Height) {
  const PerThreadDefault scope;
  return cuMemsetD2D32_v2(dstDevice, dstPitch, ui, Width, Height);
}

SOFTCUDA_API cuMemsetD8Async_ptsz(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemsetD8Async(dstDevice, uc, N, hStream);
}

SOFTCUDA_API cuMemsetD16Async_ptsz(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemsetD16Async(dstDevice, us, N, hStream);
}

SOFTCUDA_API cuMemsetD32Async_ptsz(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemsetD32Async(dstDevice, ui, N, hStream);
}

SOFTCUDA_API cuMemsetD2D8Async_ptsz(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width,
                                    size_t Height, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemsetD2D8Async(dstDevice, dstPitch, uc, Width, Height, hStream);
}

SOFTCUDA_API cuMemsetD2D16Async_ptsz(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
                                     size_t Height, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemsetD2D16Async(dstDevice, dstPitch, us, Width, Height, hStream);
}

SOFTCUDA_API cuMemsetD2D32Async_ptsz(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width,
                                     size_t Height, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemsetD2D32Async(dstDevice, dstPitch, ui, Width, Height, hStream);
}

SOFTCUDA_API cuEventRecord_ptsz(CUevent hEvent, CUstream hStream) {
  const PerThreadDefault scope;
  return cuEventRecord(hEvent, hStream);
}

SOFTCUDA_API cuEventRecordWithFlags_ptsz(CUevent hEvent, CUstream hStream, unsigned int flags) {
  const PerThreadDefault scope;
  return cuEventRecordWithFlags(hEvent, hStream, flags);
}

SOFTCUDA_API cuStreamWaitEvent_ptsz(CUstream hStream, CUevent hEvent, unsigned int Flags) {
  const PerThreadDefault scope;
  return cuStreamWaitEvent(hStream, hEvent, Flags);
}

SOFTCUDA_API cuGraphInstantiateWithParams_ptsz(CUgraphExec *phGraphExec, CUgraph hGraph,
                                               CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams) {
  const PerThreadDefault scope;
  return cuGraphInstantiateWithParams(phGraphExec, hGraph, instantiateParams);
}

SOFTCUDA_API cuGraphUpload_ptsz(CUgraphExec hGraphExec, CUstream hStream) {
  const PerThreadDefault scope;
  return cuGraphUpload(hGraphExec, hStream);
}

SOFTCUDA_API cuGraphLaunch_ptsz(CUgraphExec hGraphExec, CUstream hStream) {
  const PerThreadDefault scope;
  return cuGraphLaunch(hGraphExec, hStream);
}

SOFTCUDA_API cuLaunchKernel_ptsz(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                 unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                 unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra) {
  const PerThreadDefault scope;
  return cuLaunchKernel(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
                        kernelParams, extra);
}

SOFTCUDA_API cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) {
  const PerThreadDefault scope;
  return cuLaunchKernelEx(config, f, kernelParams, extra);
}

SOFTCUDA_API cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                            unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
                                            unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                            void **kernelParams) {
  const PerThreadDefault scope;
  return cuLaunchCooperativeKernel(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes,
                                   hStream, kernelParams);
}

SOFTCUDA_API cuLaunchHostFunc_ptsz(CUstream hStream, CUhostFn fn, void *userData) {
  const PerThreadDefault scope;
  return cuLaunchHostFunc(hStream, fn, userData);
}

SOFTCUDA_API cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemAllocAsync(dptr, bytesize, hStream);
}

SOFTCUDA_API cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemAllocFromPoolAsync(dptr, bytesize, pool, hStream);
}

SOFTCUDA_API cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream) {
  const PerThreadDefault scope;
  return cuMemFreeAsync(dptr, hStream);
}

SOFTCUDA_API cuStreamQuery_ptsz(CUstream hStream) {
  const PerThreadDefault scope;
  return cuStreamQuery(hStream);
}

SOFTCUDA_API cuStreamSynchronize_ptsz(CUstream hStream) {
  const PerThreadDefault scope;
  return cuStreamSynchronize(hStream);
}

SOFTCUDA_API cuStreamGetPriority_ptsz(CUstream hStream, int *priority) {
  const PerThreadDefault scope;
  return cuStreamGetPriority(hStream, priority);
}

SOFTCUDA_API cuStreamGetFlags_ptsz(CUstream hStream, unsigned int *flags) {
  const PerThreadDefault scope;
  return cuStreamGetFlags(hStream, flags);
}

SOFTCUDA_API cuStreamGetId_ptsz(CUstream hStream, unsigned long long *streamId) {
  const PerThreadDefault scope;
  return cuStreamGetId(hStream, streamId);
}

SOFTCUDA_API cuStreamGetDevice_ptsz(CUstream hStream, CUdevice *device) {
  const PerThreadDefault scope;
  return cuStreamGetDevice(hStream, device);
}

SOFTCUDA_API cuStreamGetCtx_ptsz(CUstream hStream, CUcontext *pctx) {
  const PerThreadDefault scope;
  return cuStreamGetCtx(hStream, pctx);
}

SOFTCUDA_API cuStreamGetCtx_v2_ptsz(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx) {
  const PerThreadDefault scope;
  return cuStreamGetCtx_v2(hStream, pCtx, pGreenCtx);
}

SOFTCUDA_API cuStreamGetAttribute_ptsz(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value_out) {
  const PerThreadDefault scope;
  return cuStreamGetAttribute(hStream, attr, value_out);
}

SOFTCUDA_API cuStreamSetAttribute_ptsz(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value) {
  const PerThreadDefault scope;
  return cuStreamSetAttribute(hStream, attr, value);
}

SOFTCUDA_API cuStreamCopyAttributes_ptsz(CUstream dst, CUstream src) {
  const PerThreadDefault scope;
  return cuStreamCopyAttributes(dst, src);
}

SOFTCUDA_API cuStreamAddCallback_ptsz(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags) {
  const PerThreadDefault scope;
  return cuStreamAddCallback(hStream, callback, userData, flags);
}

SOFTCUDA_API cuStreamIsCapturing_ptsz(CUstream hStream, CUstreamCaptureStatus *captureStatus) {
  const PerThreadDefault scope;
  return cuStreamIsCapturing(hStream, captureStatus);
}

SOFTCUDA_API cuStreamWaitValue32_v2_ptsz(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags) {
  const PerThreadDefault scope;
  return cuStreamWaitValue32_v2(stream, addr, value, flags);
}

SOFTCUDA_API cuStreamWaitValue64_v2_ptsz(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags) {
  const PerThreadDefault scope;
  return cuStreamWaitValue64_v2(stream, addr, value, flags);
}

SOFTCUDA_API cuStreamWriteValue32_v2_ptsz(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags) {
  const PerThreadDefault scope;
  return cuStreamWriteValue32_v2(stream, addr, value, flags);
}

SOFTCUDA_API cuStreamWriteValue64_v2_ptsz(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags) {
  const PerThreadDefault scope;
  return cuStreamWriteValue64_v2(stream, addr, value, flags);
}

SOFTCUDA_API cuStreamBatchMemOp_v2_ptsz(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray,
                                        unsigned int flags) {
  const PerThreadDefault scope;
  return cuStreamBatchMemOp_v2(stream, count, paramArray, flags);
}
