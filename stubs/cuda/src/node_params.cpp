// SPDX-License-Identifier: Apache-2.0
#include "node_params.h"

#include <cstring>

#include "capture.h"
#include "context.h"
#include "copies.h"
#include "event.h"
#include "launch.h"
#include "memory.h"
#include "module.h"
#include "pool.h"
#include "random.h"

namespace softcuda {

namespace {

CUcontext context_or_current(CUcontext given) {
  if (given != nullptr) {
    process().contexts.get(given, CUDA_ERROR_INVALID_VALUE);
    return given;
  }
  return Handles<Context, CUcontext>::handle(current_context());
}

AllocWork read_alloc(CUDA_MEM_ALLOC_NODE_PARAMS_v2 &params) {
  require(params.bytesize > 0 && params.poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE);
  const CUdevice device = device_at(params.poolProps.location.id).ordinal;
  const auto context = current_context();
  AllocWork work;
  work.memory = std::make_shared<Allocation>(device, params.bytesize);
  ranges().add(work.memory->range(Kind::Pool, context));
  params.dptr = work.memory->address;
  std::memcpy(&work.params, &params, sizeof work.params);
  work.params.accessDescs = nullptr;
  work.params.accessDescCount = 0;
  return work;
}

ConditionalWork read_conditional(CUDA_CONDITIONAL_NODE_PARAMS &params, const Graph *graph) {
  require(graph != nullptr);
  bool known = false;
  for (const CUgraphConditionalHandle handle : graph->conditionals) known = known || handle == params.handle;
  require(known);
  const bool is_switch = params.type == CU_GRAPH_COND_TYPE_SWITCH;
  const unsigned most = params.type == CU_GRAPH_COND_TYPE_IF ? 2 : 1;
  require(params.type <= CU_GRAPH_COND_TYPE_SWITCH && params.size > 0 && (is_switch || params.size <= most));
  ConditionalWork work;
  work.params = params;
  work.params.ctx = context_or_current(params.ctx);
  for (unsigned i = 0; i < params.size; ++i) {
    work.bodies.push_back(make_graph());
    work.bodies.back()->owned = true;
    work.handles.push_back(Handles<Graph, CUgraph>::handle(work.bodies.back()));
  }
  return work;
}

}  // namespace

KernelWork read_kernel(const CUDA_KERNEL_NODE_PARAMS_v2 &params) {
  // Unlike a launch, a node takes no kernel in the place of a function.
  const auto callee = params.func != nullptr ? process().functions.get(params.func)
                                             : callee_at(reinterpret_cast<CUfunction>(params.kern));
  return kernel_work(callee, {{params.gridDimX, params.gridDimY, params.gridDimZ},
                              {params.blockDimX, params.blockDimY, params.blockDimZ},
                              params.sharedMemBytes,
                              params.kernelParams,
                              params.extra});
}

void write_kernel(const KernelWork &work, CUDA_KERNEL_NODE_PARAMS_v2 *out) {
  scramble(out, sizeof *out);
  out->func = Handles<Function, CUfunction>::handle(work.function);
  out->gridDimX = work.grid[0];
  out->gridDimY = work.grid[1];
  out->gridDimZ = work.grid[2];
  out->blockDimX = work.block[0];
  out->blockDimY = work.block[1];
  out->blockDimZ = work.block[2];
  out->sharedMemBytes = work.shared_bytes;
  Arguments &arguments = *work.arguments;
  const bool listed = !arguments.from_extra && !arguments.pointers.empty();
  out->kernelParams = listed ? arguments.pointers.data() : nullptr;
  out->extra = arguments.from_extra ? arguments.extra.data() : nullptr;
  // A library's kernel has both handles, whichever of them the node was made with.
  out->kern = Handles<Kernel, CUkernel>::handle(work.function->kernel.lock());
  out->ctx = work.context;
}

CopyWork read_copy(const CUDA_MEMCPY3D &params, CUcontext context) {
  check_copy(params);
  require(!empty(params));
  return {params, context_or_current(context)};
}

FillWork read_fill(const CUDA_MEMSET_NODE_PARAMS &params, CUcontext context) {
  check_fill(params);
  require(params.width > 0 && params.height > 0);
  return {params, context_or_current(context)};
}

HostWork read_host(const CUDA_HOST_NODE_PARAMS &params) {
  require(params.fn != nullptr);
  return {params};
}

ChildWork read_child(CUgraph handle, const Graph *parent, CUgraphChildGraphNodeOwnership ownership) {
  const auto graph = graph_at(handle);
  require(graph.get() != parent);
  if (ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE) {
    require(!graph->owned);
    graph->owned = true;
    return {graph};
  }
  require(ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE);
  for (const auto &node : graph->nodes) {
    const CUgraphNodeType type = node_type(*node->work);
    require(type != CU_GRAPH_NODE_TYPE_MEM_ALLOC && type != CU_GRAPH_NODE_TYPE_MEM_FREE &&
                type != CU_GRAPH_NODE_TYPE_CONDITIONAL,
            CUDA_ERROR_NOT_SUPPORTED);
  }
  auto clone = clone_graph(*graph, true);
  clone->owned = true;
  return {std::move(clone)};
}

WaitWork read_wait(CUevent event) {
  return {process().events.get(event, CUDA_ERROR_INVALID_VALUE)};
}

RecordWork read_record(CUevent event) {
  return {process().events.get(event, CUDA_ERROR_INVALID_VALUE)};
}

BatchWork read_batch(const CUDA_BATCH_MEM_OP_NODE_PARAMS &params) {
  require(params.count > 0 && params.count <= 256 && params.paramArray != nullptr && params.flags == 0);
  BatchWork work;
  work.context = context_or_current(params.ctx);
  work.flags = params.flags;
  work.ops =
      std::make_shared<std::vector<CUstreamBatchMemOpParams>>(params.paramArray, params.paramArray + params.count);
  return work;
}

Work read_work(CUgraphNodeParams &params, const Graph *graph, const Work *current) {
  for (const int word : params.reserved0) require(word == 0);
  require(params.reserved2 == 0);
  if (current != nullptr) require(node_type(*current) == params.type);
  switch (params.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      CUDA_KERNEL_NODE_PARAMS_v2 kernel{};
      static_assert(sizeof kernel == sizeof params.kernel);
      std::memcpy(&kernel, &params.kernel, sizeof kernel);
      return read_kernel(kernel);
    }
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      require(params.memcpy.flags == 0);
      return read_copy(params.memcpy.copyParams, params.memcpy.copyCtx);
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      CUDA_MEMSET_NODE_PARAMS fill{};
      std::memcpy(&fill, &params.memset, sizeof fill);
      return read_fill(fill, params.memset.ctx);
    }
    case CU_GRAPH_NODE_TYPE_HOST:
      return read_host({params.host.fn, params.host.userData});
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return read_child(params.graph.graph, graph, params.graph.ownership);
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return EmptyWork{};
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return read_wait(params.eventWait.event);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return read_record(params.eventRecord.event);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return read_batch({params.memOp.ctx, params.memOp.count, params.memOp.paramArray, params.memOp.flags});
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
      require(current == nullptr);
      return read_alloc(params.alloc);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      require(current == nullptr && params.free.dptr != 0);
      return FreeWork{params.free.dptr};
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      require(current == nullptr);
      return read_conditional(params.conditional, graph);
    default:
      throw Failure{CUDA_ERROR_NOT_SUPPORTED};
  }
}

void set_work(Node &node, Work work) {
  node.work = std::make_shared<const Work>(std::move(work));
}

}  // namespace softcuda
