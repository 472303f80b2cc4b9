// SPDX-License-Identifier: Apache-2.0
//
// Nodes of each type: add, read, change.
#include <cstring>

#include "event.h"
#include "graph.h"
#include "launch.h"
#include "module.h"
#include "node_params.h"
#include "random.h"

namespace softcuda {

namespace {

using NodeHandles = Handles<Node, CUgraphNode>;

// Adds a node whose work `make` reads from the caller's parameters.
template <class Make>
CUresult add(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count, Make make) {
  return locked_call([&] {
    require(out != nullptr);
    *out = NodeHandles::handle(add_node_after(graph, dependencies, nullptr, count, make()));
  });
}

CUDA_KERNEL_NODE_PARAMS_v2 widen(const CUDA_KERNEL_NODE_PARAMS_v1 &params) {
  CUDA_KERNEL_NODE_PARAMS_v2 out{};
  std::memcpy(&out, &params, sizeof params);
  return out;
}

}  // namespace

}  // namespace softcuda

using namespace softcuda;

// ---- kernel ---------------------------------------------------------------------------------------------------

SOFTCUDA_API cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                     size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&] {
    require(nodeParams != nullptr);
    return read_kernel(*nodeParams);
  });
}

SOFTCUDA_API cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                  size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&] {
    require(nodeParams != nullptr);
    return read_kernel(widen(*nodeParams));
  });
}

SOFTCUDA_API cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    write_kernel(work_of<KernelWork>(*node_at(hNode)), nodeParams);
  });
}

SOFTCUDA_API cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    CUDA_KERNEL_NODE_PARAMS_v2 params{};
    write_kernel(work_of<KernelWork>(*node_at(hNode)), &params);
    std::memcpy(nodeParams, &params, sizeof *nodeParams);
  });
}

SOFTCUDA_API cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    const auto node = node_at(hNode);
    work_of<KernelWork>(*node);
    KernelWork work = read_kernel(*nodeParams);
    check_node_attributes(work, node->attributes);
    set_work(*node, std::move(work));
  });
}

SOFTCUDA_API cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    const auto node = node_at(hNode);
    work_of<KernelWork>(*node);
    KernelWork work = read_kernel(widen(*nodeParams));
    check_node_attributes(work, node->attributes);
    set_work(*node, std::move(work));
  });
}

// ---- memcpy, memset -------------------------------------------------------------------------------------------

SOFTCUDA_API cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                  size_t numDependencies, const CUDA_MEMCPY3D *copyParams, CUcontext ctx) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&] {
    require(copyParams != nullptr);
    return read_copy(*copyParams, ctx);
  });
}

SOFTCUDA_API cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    const CUDA_MEMCPY3D &params = work_of<CopyWork>(*node_at(hNode)).params;
    // Field by field: the padding beside the memory types is nobody's business.
    scramble(nodeParams, sizeof *nodeParams);
    nodeParams->srcXInBytes = params.srcXInBytes;
    nodeParams->srcY = params.srcY;
    nodeParams->srcZ = params.srcZ;
    nodeParams->srcLOD = params.srcLOD;
    nodeParams->srcMemoryType = params.srcMemoryType;
    nodeParams->srcHost = params.srcHost;
    nodeParams->srcDevice = params.srcDevice;
    nodeParams->srcArray = params.srcArray;
    nodeParams->reserved0 = nullptr;
    nodeParams->srcPitch = params.srcPitch;
    nodeParams->srcHeight = params.srcHeight;
    nodeParams->dstXInBytes = params.dstXInBytes;
    nodeParams->dstY = params.dstY;
    nodeParams->dstZ = params.dstZ;
    nodeParams->dstLOD = params.dstLOD;
    nodeParams->dstMemoryType = params.dstMemoryType;
    nodeParams->dstHost = params.dstHost;
    nodeParams->dstDevice = params.dstDevice;
    nodeParams->dstArray = params.dstArray;
    nodeParams->reserved1 = nullptr;
    nodeParams->dstPitch = params.dstPitch;
    nodeParams->dstHeight = params.dstHeight;
    nodeParams->WidthInBytes = params.WidthInBytes;
    nodeParams->Height = params.Height;
    nodeParams->Depth = params.Depth;
  });
}

SOFTCUDA_API cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    const auto node = node_at(hNode);
    set_work(*node, read_copy(*nodeParams, work_of<CopyWork>(*node).context));
  });
}

SOFTCUDA_API cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                  size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&] {
    require(memsetParams != nullptr);
    return read_fill(*memsetParams, ctx);
  });
}

SOFTCUDA_API cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    *nodeParams = work_of<FillWork>(*node_at(hNode)).params;
  });
}

SOFTCUDA_API cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    const auto node = node_at(hNode);
    set_work(*node, read_fill(*nodeParams, work_of<FillWork>(*node).context));
  });
}

// ---- host, child, empty ---------------------------------------------------------------------------------------

SOFTCUDA_API cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&] {
    require(nodeParams != nullptr);
    return read_host(*nodeParams);
  });
}

SOFTCUDA_API cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    *nodeParams = work_of<HostWork>(*node_at(hNode)).params;
  });
}

SOFTCUDA_API cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    const auto node = node_at(hNode);
    work_of<HostWork>(*node);
    set_work(*node, read_host(*nodeParams));
  });
}

SOFTCUDA_API cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                      size_t numDependencies, CUgraph childGraph) {
  return add(phGraphNode, hGraph, dependencies, numDependencies,
             [&] { return read_child(childGraph, graph_at(hGraph).get(), CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE); });
}

SOFTCUDA_API cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph *phGraph) {
  return locked_call([&] {
    require(phGraph != nullptr);
    *phGraph = Handles<Graph, CUgraph>::handle(work_of<ChildWork>(*node_at(hNode)).graph);
  });
}

SOFTCUDA_API cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                 size_t numDependencies) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [] { return EmptyWork{}; });
}

// ---- events ---------------------------------------------------------------------------------------------------

SOFTCUDA_API cuGraphAddEventRecordNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                       size_t numDependencies, CUevent event) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&] { return read_record(event); });
}

SOFTCUDA_API cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent *event_out) {
  return locked_call([&] {
    require(event_out != nullptr);
    *event_out = Handles<Event, CUevent>::handle(work_of<RecordWork>(*node_at(hNode)).event);
  });
}

SOFTCUDA_API cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event) {
  return locked_call([&] {
    const auto node = node_at(hNode);
    work_of<RecordWork>(*node);
    set_work(*node, read_record(event));
  });
}

SOFTCUDA_API cuGraphAddEventWaitNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                     size_t numDependencies, CUevent event) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&] { return read_wait(event); });
}

SOFTCUDA_API cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent *event_out) {
  return locked_call([&] {
    require(event_out != nullptr);
    *event_out = Handles<Event, CUevent>::handle(work_of<WaitWork>(*node_at(hNode)).event);
  });
}

SOFTCUDA_API cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent event) {
  return locked_call([&] {
    const auto node = node_at(hNode);
    work_of<WaitWork>(*node);
    set_work(*node, read_wait(event));
  });
}

// ---- batch memory operations, allocation ----------------------------------------------------------------------

SOFTCUDA_API cuGraphAddBatchMemOpNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                      size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&] {
    require(nodeParams != nullptr);
    return read_batch(*nodeParams);
  });
}

SOFTCUDA_API cuGraphBatchMemOpNodeGetParams(CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams_out) {
  return locked_call([&] {
    require(nodeParams_out != nullptr);
    const auto &work = work_of<BatchWork>(*node_at(hNode));
    scramble(nodeParams_out, sizeof *nodeParams_out);
    nodeParams_out->ctx = work.context;
    nodeParams_out->count = static_cast<unsigned>(work.ops->size());
    nodeParams_out->paramArray = work.ops->data();
    nodeParams_out->flags = work.flags;
  });
}

SOFTCUDA_API cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    const auto node = node_at(hNode);
    work_of<BatchWork>(*node);
    set_work(*node, read_batch(*nodeParams));
  });
}

SOFTCUDA_API cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                    size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&]() -> Work {
    require(nodeParams != nullptr);
    CUgraphNodeParams params{};
    params.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    std::memcpy(&params.alloc, nodeParams, sizeof *nodeParams);
    Work work = read_work(params, nullptr, nullptr);
    nodeParams->dptr = params.alloc.dptr;
    return work;
  });
}

SOFTCUDA_API cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out) {
  return locked_call([&] {
    require(params_out != nullptr);
    *params_out = work_of<AllocWork>(*node_at(hNode)).params;
  });
}

SOFTCUDA_API cuGraphAddMemFreeNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                   size_t numDependencies, CUdeviceptr dptr) {
  return add(phGraphNode, hGraph, dependencies, numDependencies, [&] {
    require(dptr != 0);
    return FreeWork{dptr};
  });
}

SOFTCUDA_API cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr *dptr_out) {
  return locked_call([&] {
    require(dptr_out != nullptr);
    *dptr_out = work_of<FreeWork>(*node_at(hNode)).address;
  });
}

// ---- any type -------------------------------------------------------------------------------------------------

namespace {

CUresult add_any(CUgraphNode *out, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *data,
                 size_t count, CUgraphNodeParams *params) {
  return locked_call([&] {
    require(out != nullptr && params != nullptr);
    const auto graph = graph_at(hGraph);
    const auto node = add_node_after(hGraph, dependencies, data, count, read_work(*params, graph.get(), nullptr));
    if (params->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
      // The array of body graphs belongs to the node.
      auto &handles = const_cast<std::vector<CUgraph> &>(work_of<ConditionalWork>(*node).handles);
      params->conditional.phGraph_out = handles.data();
    }
    *out = NodeHandles::handle(node);
  });
}

}  // namespace

SOFTCUDA_API cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                            size_t numDependencies, CUgraphNodeParams *nodeParams) {
  return add_any(phGraphNode, hGraph, dependencies, nullptr, numDependencies, nodeParams);
}

SOFTCUDA_API cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                               const CUgraphEdgeData *dependencyData, size_t numDependencies,
                               CUgraphNodeParams *nodeParams) {
  return add_any(phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams);
}

SOFTCUDA_API cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    const auto node = node_at(hNode);
    require(nodeParams->type != CU_GRAPH_NODE_TYPE_GRAPH, CUDA_ERROR_NOT_SUPPORTED);
    set_work(*node, read_work(*nodeParams, node->graph.lock().get(), node->work.get()));
  });
}

SOFTCUDA_API cuGraphConditionalHandleCreate(CUgraphConditionalHandle *pHandle_out, CUgraph hGraph, CUcontext,
                                            unsigned int, unsigned int flags) {
  return locked_call([&] {
    require(pHandle_out != nullptr && (flags & ~unsigned{CU_GRAPH_COND_ASSIGN_DEFAULT}) == 0);
    const auto graph = graph_at(hGraph);
    *pHandle_out = draw() | 1;
    graph->conditionals.push_back(*pHandle_out);
  });
}
