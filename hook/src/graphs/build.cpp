// SPDX-License-Identifier: Apache-2.0
#include "graphs/build.h"

#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "graphs/attributes.h"
#include "graphs/creation.h"
#include "graphs/edges.h"
#include "graphs/kernel_node.h"
#include "graphs/made.h"
#include "graphs/splice.h"
#include "graphs/validate.h"
#include "support/driver.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

class Builder {
 public:
  Builder(std::span<const uint64_t> functions, std::span<void *const> comm_graphs, BuildMemory &memory)
      : kernels_(functions), comm_graphs_(comm_graphs), memory_(memory) {
    FDY_CU(cuCtxGetCurrent, &context_);
    if (context_ == nullptr)
      throw Error(FDY_ERROR_STATE, "no context is current on this thread: make the engine's current before building");
  }

  // `nodes`, if not NULL, becomes the node for each of `source`.
  GraphOwner build(const fdy_graph &source, size_t depth = 0, std::vector<CUgraphNode> *nodes = nullptr) {
    GraphOwner graph = create_graph();
    auto &[bodies, made, edges] = memory_.level(depth);
    std::map<uint32_t, std::vector<CUgraphNode>> last_of;  // by communicator: tails of its latest collective
    bodies.reserve(source.node_count);
    made.reserve(source.node_count);
    edges.reserve(source.edge_count);
    for (uint64_t i = 0; i < source.node_count; ++i) {
      const fdy_node &node = source.nodes[i];
      if (node.type == FDY_NODE_COMM) {
        bodies.push_back(add_collective(graph.get(), node, last_of, edges, made));
      } else {
        bodies.push_back(add_node(graph.get(), source, node, depth));
        made.push_back(bodies.back());
      }
    }
    const bool spliced = !edges.empty();
    for (uint64_t i = 0; i < source.edge_count; ++i) {
      const fdy_edge &e = source.edges[i];
      edges.push_back({bodies[e.from], bodies[e.to], e.from_port, e.to_port, e.type});
    }
    // An edge of the graph may say again what the order of a communicator says; its own data counts, and that is last.
    if (spliced) drop_doubles(edges, memory_.edges);
    add_edges(graph.get(), edges, memory_.edges);
    Creations::get().note(graph.get(), made);
    if (nodes != nullptr) *nodes = bodies;
    return graph;
  }

  std::vector<CUgraph> small_graphs() const { return {small_.begin(), small_.end()}; }

 private:
  CUgraphNode add_node(CUgraph graph, const fdy_graph &source, const fdy_node &node, size_t depth) {
    const uint8_t *params = source.params + node.param_offset;
    CUgraphNode out = nullptr;
    switch (node.type) {
      case FDY_NODE_KERNEL:
        return add_kernel(graph, source, node);
      case FDY_NODE_MEMCPY: {
        CUDA_MEMCPY3D_v2 copy;
        std::memcpy(&copy, params, sizeof copy);
        FDY_CU(cuGraphAddMemcpyNode, &out, graph, nullptr, 0, &copy, context_);
        return out;
      }
      case FDY_NODE_MEMSET: {
        CUDA_MEMSET_NODE_PARAMS_v1 set;
        std::memcpy(&set, params, sizeof set);
        FDY_CU(cuGraphAddMemsetNode, &out, graph, nullptr, 0, &set, context_);
        return out;
      }
      case FDY_NODE_CHILD: {
        const GraphOwner child = build(source.children[node.child], depth + 1);
        FDY_CU(cuGraphAddChildGraphNode, &out, graph, nullptr, 0, child.get());  // clones it
        return out;
      }
      default:
        FDY_CU(cuGraphAddEmptyNode, &out, graph, nullptr, 0);
        return out;
    }
  }

  CUgraphNode add_kernel(CUgraph graph, const fdy_graph &source, const fdy_node &node) {
    CUgraphNode out = nullptr;
    FDY_CU(cuGraphAddKernelNode_v2, &out, graph, nullptr, 0, &kernels_.params_of(source, node));
    write_attributes(out, attributes_of(source, node));
    return out;
  }

  CUgraphNode add_collective(CUgraph graph, const fdy_node &node, std::map<uint32_t, std::vector<CUgraphNode>> &last_of,
                             std::vector<Edge> &edges, std::vector<CUgraphNode> &made) {
    const auto small = static_cast<CUgraph>(comm_graphs_[node.comm_group]);
    small_.insert(small);
    const Spliced spliced = splice(graph, small);
    made.insert(made.end(), spliced.made.begin(), spliced.made.end());
    edges.insert(edges.end(), spliced.edges.begin(), spliced.edges.end());
    // One kernel of a communicator at a time, in the order that all its ranks share.
    std::vector<CUgraphNode> &last = last_of[MadeGraphs::get().communicator_of(small).value_or(FDY_NONE)];
    for (CUgraphNode tail : last)
      for (CUgraphNode head : spliced.heads) edges.push_back({tail, head});
    last = spliced.tails;
    return spliced.body;
  }

  KernelNodes kernels_;
  std::span<void *const> comm_graphs_;
  BuildMemory &memory_;
  CUcontext context_ = nullptr;
  std::set<CUgraph> small_;
};

}  // namespace

CUgraph build_graph(const fdy_graph &graph, std::span<const uint64_t> functions, std::span<void *const> comm_graphs,
                    BuildMemory &memory, std::vector<CUgraphNode> *nodes) {
  validate(graph, functions, comm_graphs);
  const BuildMemory::Use use(memory);
  Builder builder(functions, comm_graphs, memory);
  GraphOwner built = builder.build(graph, 0, nodes);
  MadeGraphs::get().add_built(built.get(), builder.small_graphs());
  return built.release();
}

void set_kernel_params(CUgraphExec executable, const fdy_graph &graph, std::span<const uint64_t> functions,
                       std::span<void *const> nodes, std::span<const uint32_t> which) {
  if (nodes.size() != graph.node_count)
    throw Error(FDY_ERROR_INVALID, "the graph has %llu nodes and %zu were built: pass those that build_graph gave",
                static_cast<unsigned long long>(graph.node_count), nodes.size());
  for (const uint32_t i : which) validate_kernel(i, graph, functions);
  KernelNodes kernels(functions);
  for (const uint32_t i : which)
    FDY_CU(cuGraphExecKernelNodeSetParams_v2, executable, static_cast<CUgraphNode>(nodes[i]),
           &kernels.params_of(graph, graph.nodes[i]));
}

}  // namespace foundryd::graphs
