// SPDX-License-Identifier: Apache-2.0
//
// Instantiation, launch, and changes to single nodes of an executable.
#include "graph_exec.h"

#include <algorithm>
#include <cstring>

#include "capture.h"
#include "context.h"
#include "event.h"
#include "launch.h"
#include "module.h"
#include "node_params.h"

namespace softcuda {

namespace {

using ExecHandles = Handles<GraphExec, CUgraphExec>;
using NodeHandles = Handles<Node, CUgraphNode>;

constexpr uint64_t kFlags = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
                            CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;

struct Refusal {
  CUresult code = CUDA_SUCCESS;
  CUgraphInstantiateResult result = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  const Node *node = nullptr;
};

Refusal check_graph(const Graph &graph) {
  if (!graph.nodes.empty() && topological(graph).empty()) {
    return {CUDA_ERROR_INVALID_VALUE, CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE, graph.nodes.front().get()};
  }
  for (const auto &node : graph.nodes) {
    const CUgraphNodeType type = node_type(*node->work);
    if (type == CU_GRAPH_NODE_TYPE_CONDITIONAL || type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP) {
      return {CUDA_ERROR_NOT_SUPPORTED, CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED, node.get()};
    }
    if (const auto *child = std::get_if<ChildWork>(node->work.get())) {
      if (const Refusal refusal = check_graph(*child->graph); refusal.code != CUDA_SUCCESS) return refusal;
    }
  }
  return {};
}

void collect_functions(const Graph &graph, std::vector<std::shared_ptr<Function>> &out) {
  for (const auto &node : graph.nodes) {
    if (const auto *kernel = std::get_if<KernelWork>(node->work.get())) out.push_back(kernel->function);
    if (const auto *child = std::get_if<ChildWork>(node->work.get())) collect_functions(*child->graph, out);
  }
}

bool allocates(const Graph &graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const auto &node) {
    const CUgraphNodeType type = node_type(*node->work);
    return type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || type == CU_GRAPH_NODE_TYPE_MEM_FREE;
  });
}

Refusal instantiate(CUgraphExec *out, CUgraph hGraph, uint64_t flags) {
  Lock lock = lock_process();
  require(out != nullptr && (flags & ~kFlags) == 0);
  refuse_under_capture();
  require((flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) == 0, CUDA_ERROR_NOT_SUPPORTED);
  std::vector<std::shared_ptr<Function>> functions;
  collect_functions(*graph_at(hGraph), functions);
  for (const auto &function : functions) {
    if (!function->module.expired()) ensure_loaded(lock, function);
  }
  const auto graph = graph_at(hGraph);
  if (const Refusal refusal = check_graph(*graph); refusal.code != CUDA_SUCCESS) return refusal;
  const bool counted = allocates(*graph);
  require(!counted || graph->executables == 0, CUDA_ERROR_NOT_SUPPORTED);
  const auto exec = process().execs.make();
  if (counted) {
    ++graph->executables;
    exec->counted_by = graph;
  }
  exec->snapshot = clone_graph(*graph, false);
  exec->flags = flags & ~uint64_t{CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD};
  index_snapshot(*exec);
  exec->program = make_program(*exec);
  ++counters().instantiations;
  *out = ExecHandles::handle(exec);
  return {};
}

CUresult instantiate_plain(CUgraphExec *out, CUgraph graph, uint64_t flags) {
  return call([&] {
    const Refusal refusal = instantiate(out, graph, flags);
    require(refusal.code == CUDA_SUCCESS, refusal.code);
  });
}

void index_graph(GraphExec &exec, const Graph &graph) {
  for (const auto &node : graph.nodes) {
    exec.by_origin.emplace(node->parent, node.get());
    if (const auto *child = std::get_if<ChildWork>(node->work.get())) index_graph(exec, *child->graph);
  }
}

// Replaces the work of a node in an executable; `make` reads the caller's parameters and checks them against the
// old work.
template <class Kind, class Make>
CUresult change(CUgraphExec hExec, CUgraphNode hNode, Make make) {
  return locked_call([&] {
    const auto exec = exec_at(hExec);
    Node &node = exec_node(*exec, hNode);
    set_work(node, make(work_of<Kind>(node), node));
    exec->program.reset();
  });
}

KernelWork changed_kernel(const KernelWork &old, const Node &node, const CUDA_KERNEL_NODE_PARAMS_v2 &params) {
  KernelWork work = read_kernel(params);
  require(work.context == old.context);
  // Attributes are not among the parameters: the node keeps the ones that it was instantiated with.
  check_attributes(work, node.attributes);
  return work;
}

CopyWork changed_copy(const CopyWork &old, const CUDA_MEMCPY3D &params, CUcontext context) {
  CopyWork work = read_copy(params, context);
  require(params.srcMemoryType == old.params.srcMemoryType && params.dstMemoryType == old.params.dstMemoryType);
  const bool flat = params.Height == 1 && params.Depth == 1;
  require(flat == (old.params.Height == 1 && old.params.Depth == 1));
  return work;
}

FillWork changed_fill(const FillWork &old, const CUDA_MEMSET_NODE_PARAMS &params, CUcontext context) {
  FillWork work = read_fill(params, context);
  const bool flat = params.height == 1;
  require(flat == (old.params.height == 1));
  require(flat || (params.width == old.params.width && params.height == old.params.height &&
                   params.elementSize == old.params.elementSize && params.pitch == old.params.pitch));
  return work;
}

void change_child(GraphExec &exec, Node &node, const Graph &source) {
  const auto &old = work_of<ChildWork>(node);
  const UpdateResult result = update_graph(*old.graph, source, exec.flags, exec.on_device);
  require(result.result == CU_GRAPH_EXEC_UPDATE_SUCCESS, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  exec.program.reset();
}

}  // namespace

std::shared_ptr<GraphExec> exec_at(CUgraphExec handle) {
  return process().execs.get(handle, CUDA_ERROR_INVALID_VALUE);
}

Node &exec_node(GraphExec &exec, CUgraphNode handle) {
  const auto it = exec.by_origin.find(node_at(handle)->id);
  require(it != exec.by_origin.end());
  return *it->second;
}

void index_snapshot(GraphExec &exec) {
  exec.by_origin.clear();
  index_graph(exec, *exec.snapshot);
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags) {
  return instantiate_plain(phGraphExec, hGraph, flags);
}

SOFTCUDA_API cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
                                   size_t bufferSize) {
  return call([&] {
    if (logBuffer != nullptr && bufferSize > 0) *logBuffer = '\0';
    const Refusal refusal = instantiate(phGraphExec, hGraph, 0);
    if (phErrorNode != nullptr) *phErrorNode = NodeHandles::handle(refusal.node);
    require(refusal.code == CUDA_SUCCESS, refusal.code);
  });
}

SOFTCUDA_API cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
                                          CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams) {
  return call([&] {
    require(instantiateParams != nullptr);
    instantiateParams->hErrNode_out = nullptr;
    instantiateParams->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
    if ((instantiateParams->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0) {
      const Lock lock = lock_process();
      resolve_stream(instantiateParams->hUploadStream);
    }
    const Refusal refusal = instantiate(phGraphExec, hGraph, instantiateParams->flags);
    instantiateParams->result_out = refusal.result;
    instantiateParams->hErrNode_out = NodeHandles::handle(refusal.node);
    require(refusal.code == CUDA_SUCCESS, refusal.code);
  });
}

SOFTCUDA_API cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t *flags) {
  return locked_call([&] {
    require(flags != nullptr);
    // Kept, and not told.
    *flags = exec_at(hGraphExec)->flags & ~uint64_t{CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY};
  });
}

SOFTCUDA_API cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream) {
  return locked_call([&] {
    const auto exec = exec_at(hGraphExec);
    refuse_capturing(*resolve_stream(hStream));
    exec->on_device = true;
  });
}

SOFTCUDA_API cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream) {
  return call([&] {
    Lock lock = lock_process();
    const auto exec = exec_at(hGraphExec);
    wait_for_loading(lock, current_context());
    const auto stream = resolve_stream(hStream);
    refuse_capturing(*stream);
    launch_program(*exec, *stream);
    exec->on_device = true;
    ++counters().graph_launches;
  });
}

SOFTCUDA_API cuGraphExecDestroy(CUgraphExec hGraphExec) {
  return locked_call([&] {
    const auto exec = exec_at(hGraphExec);
    process().execs.remove(exec.get());
    if (const auto graph = exec->counted_by.lock()) --graph->executables;
    exec->program.reset();
    if (exec->last.done()) {
      destroy_graph(exec->snapshot);
      return;
    }
    // What the graph keeps alive for its kernels stays until the launch in flight has ended.
    process().reaper->submit([exec] {
      exec->last.wait();
      const Lock lock = lock_process();
      destroy_graph(exec->snapshot);
    });
  });
}

SOFTCUDA_API cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
                                               const CUDA_KERNEL_NODE_PARAMS *nodeParams) {
  return change<KernelWork>(hGraphExec, hNode, [&](const KernelWork &old, const Node &node) {
    require(nodeParams != nullptr);
    return changed_kernel(old, node, *nodeParams);
  });
}

SOFTCUDA_API cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                            const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams) {
  return change<KernelWork>(hGraphExec, hNode, [&](const KernelWork &old, const Node &node) {
    require(nodeParams != nullptr);
    CUDA_KERNEL_NODE_PARAMS_v2 params{};
    std::memcpy(&params, nodeParams, sizeof *nodeParams);
    return changed_kernel(old, node, params);
  });
}

SOFTCUDA_API cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams,
                                            CUcontext ctx) {
  return change<CopyWork>(hGraphExec, hNode, [&](const CopyWork &old, const Node &) {
    require(copyParams != nullptr);
    return changed_copy(old, *copyParams, ctx);
  });
}

SOFTCUDA_API cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                            const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx) {
  return change<FillWork>(hGraphExec, hNode, [&](const FillWork &old, const Node &) {
    require(memsetParams != nullptr);
    return changed_fill(old, *memsetParams, ctx);
  });
}

SOFTCUDA_API cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                          const CUDA_HOST_NODE_PARAMS *nodeParams) {
  return change<HostWork>(hGraphExec, hNode, [&](const HostWork &, const Node &) {
    require(nodeParams != nullptr);
    return read_host(*nodeParams);
  });
}

SOFTCUDA_API cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event) {
  return change<RecordWork>(hGraphExec, hNode, [&](const RecordWork &, const Node &) { return read_record(event); });
}

SOFTCUDA_API cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event) {
  return change<WaitWork>(hGraphExec, hNode, [&](const WaitWork &, const Node &) { return read_wait(event); });
}

SOFTCUDA_API cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph) {
  return locked_call([&] {
    const auto exec = exec_at(hGraphExec);
    change_child(*exec, exec_node(*exec, hNode), *graph_at(childGraph));
  });
}

SOFTCUDA_API cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams) {
  return locked_call([&] {
    require(nodeParams != nullptr);
    const auto exec = exec_at(hGraphExec);
    Node &node = exec_node(*exec, hNode);
    require(node_type(*node.work) == nodeParams->type);
    if (nodeParams->type == CU_GRAPH_NODE_TYPE_GRAPH) {
      change_child(*exec, node, *graph_at(nodeParams->graph.graph));
      return;
    }
    Work work = read_work(*nodeParams, nullptr, node.work.get());
    if (const auto *kernel = std::get_if<KernelWork>(&work)) {
      require(kernel->context == work_of<KernelWork>(node).context);
      check_attributes(*kernel, node.attributes);
    } else if (const auto *copy = std::get_if<CopyWork>(&work)) {
      changed_copy(work_of<CopyWork>(node), copy->params, copy->context);
    } else if (const auto *fill = std::get_if<FillWork>(&work)) {
      changed_fill(work_of<FillWork>(node), fill->params, fill->context);
    }
    set_work(node, std::move(work));
    exec->program.reset();
  });
}

SOFTCUDA_API cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled) {
  return locked_call([&] {
    const auto exec = exec_at(hGraphExec);
    const Node &node = exec_node(*exec, hNode);
    const CUgraphNodeType type = node_type(*node.work);
    require(type == CU_GRAPH_NODE_TYPE_KERNEL || type == CU_GRAPH_NODE_TYPE_MEMCPY ||
            type == CU_GRAPH_NODE_TYPE_MEMSET);
    if (isEnabled != 0) {
      exec->disabled.erase(&node);
    } else {
      exec->disabled.insert(&node);
    }
    exec->program.reset();
  });
}

SOFTCUDA_API cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled) {
  return locked_call([&] {
    require(isEnabled != nullptr);
    const auto exec = exec_at(hGraphExec);
    *isEnabled = exec->disabled.count(&exec_node(*exec, hNode)) == 0 ? 1 : 0;
  });
}
