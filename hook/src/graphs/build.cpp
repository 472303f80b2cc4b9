// SPDX-License-Identifier: Apache-2.0
#include "graphs/build.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "graphs/attributes.h"
#include "graphs/creation.h"
#include "graphs/edges.h"
#include "graphs/made.h"
#include "graphs/splice.h"
#include "graphs/validate.h"
#include "modules/functions.h"
#include "support/driver.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

class Builder {
 public:
  Builder(std::span<const uint64_t> functions, std::span<void *const> comm_graphs)
      : functions_(functions), comm_graphs_(comm_graphs) {
    FDY_CU(cuCtxGetCurrent, &context_);
    if (context_ == nullptr)
      throw Error(FDY_ERROR_STATE, "no context is current on this thread: make the engine's current before building");
  }

  GraphOwner build(const fdy_graph &source) {
    GraphOwner graph = create_graph();
    std::vector<CUgraphNode> bodies;
    std::vector<Edge> edges;
    std::vector<CUgraphNode> made;
    std::map<uint32_t, std::vector<CUgraphNode>> last_of;  // by communicator: tails of its latest collective
    bodies.reserve(source.node_count);
    for (uint64_t i = 0; i < source.node_count; ++i) {
      const fdy_node &node = source.nodes[i];
      if (node.type == FDY_NODE_COMM) {
        bodies.push_back(add_collective(graph.get(), node, last_of, edges, made));
      } else {
        bodies.push_back(add_node(graph.get(), source, node));
        made.push_back(bodies.back());
      }
    }
    for (uint64_t i = 0; i < source.edge_count; ++i) {
      const fdy_edge &e = source.edges[i];
      edges.push_back({bodies[e.from], bodies[e.to], e.from_port, e.to_port, e.type});
    }
    add_edges(graph.get(), without_doubles(std::move(edges)));
    for (CUgraphNode node : made) Creations::get().note(graph.get(), node);
    return graph;
  }

  std::vector<CUgraph> small_graphs() const { return {small_.begin(), small_.end()}; }

 private:
  // An edge of the graph may say again what the order of a communicator says; its own data counts, and that comes last.
  static std::vector<Edge> without_doubles(std::vector<Edge> edges) {
    std::map<std::pair<CUgraphNode, CUgraphNode>, Edge> unique;
    for (const Edge &e : edges) unique.insert_or_assign({e.from, e.to}, e);
    std::vector<Edge> out;
    for (const auto &[pair, edge] : unique) out.push_back(edge);
    return out;
  }

  CUgraphNode add_node(CUgraph graph, const fdy_graph &source, const fdy_node &node) {
    const uint8_t *params = source.params + node.param_offset;
    CUgraphNode out = nullptr;
    switch (node.type) {
      case FDY_NODE_KERNEL:
        return add_kernel(graph, source, node, params);
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
        const GraphOwner child = build(source.children[node.child]);
        FDY_CU(cuGraphAddChildGraphNode, &out, graph, nullptr, 0, child.get());  // clones it
        return out;
      }
      default:
        FDY_CU(cuGraphAddEmptyNode, &out, graph, nullptr, 0);
        return out;
    }
  }

  CUgraphNode add_kernel(CUgraph graph, const fdy_graph &source, const fdy_node &node, const uint8_t *bytes) {
    const uint64_t handle = functions_[node.function];
    const modules::ParamLayout &layout = layout_of(handle);
    const std::span<const fdy_attribute> attributes(source.attributes + node.attribute_first, node.attribute_count);
    CUDA_KERNEL_NODE_PARAMS_v2 params{};
    params.func = reinterpret_cast<CUfunction>(static_cast<uintptr_t>(handle));
    params.gridDimX = node.grid[0];
    params.gridDimY = node.grid[1];
    params.gridDimZ = node.grid[2];
    params.blockDimX = node.block[0];
    params.blockDimY = node.block[1];
    params.blockDimZ = node.block[2];
    params.sharedMemBytes = node.shared_bytes;

    const bool fits = node.param_kind == FDY_PARAM_LIST    ? node.param_bytes == layout.bytes
                      : node.param_kind == FDY_PARAM_EXTRA ? node.param_bytes <= layout.bytes
                                                           : layout.fields.empty() && node.param_bytes == 0;
    if (!fits)
      throw Error(FDY_ERROR_INVALID,
                  "a node has %u bytes of parameters of kind %u for function %u, which takes %u: the "
                  "archive's function is another one",
                  node.param_bytes, node.param_kind, node.function, layout.bytes);

    // The driver refuses a cooperative kernel with `extra`; a list must point into a whole block.
    std::vector<uint8_t> block(bytes, bytes + node.param_bytes);
    std::vector<void *> list;
    size_t size = block.size();
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, block.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     CU_LAUNCH_PARAM_END};
    if (node.param_kind == FDY_PARAM_LIST || (node.param_kind == FDY_PARAM_EXTRA && is_cooperative(attributes))) {
      block.resize(layout.bytes);
      for (const fdy_field &field : layout.fields) list.push_back(block.data() + field.offset);
      params.kernelParams = list.data();
    } else if (node.param_kind == FDY_PARAM_EXTRA) {
      params.extra = extra;
    }
    CUgraphNode out = nullptr;
    FDY_CU(cuGraphAddKernelNode_v2, &out, graph, nullptr, 0, &params);
    write_attributes(out, attributes);
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

  const modules::ParamLayout &layout_of(uint64_t handle) {
    const auto it = layouts_.find(handle);
    if (it != layouts_.end()) return it->second;
    const auto function = reinterpret_cast<CUfunction>(static_cast<uintptr_t>(handle));
    return layouts_.emplace(handle, modules::param_layout(function, nullptr)).first->second;
  }

  std::span<const uint64_t> functions_;
  std::span<void *const> comm_graphs_;
  CUcontext context_ = nullptr;
  std::unordered_map<uint64_t, modules::ParamLayout> layouts_;
  std::set<CUgraph> small_;
};

}  // namespace

CUgraph build_graph(const fdy_graph &graph, std::span<const uint64_t> functions, std::span<void *const> comm_graphs) {
  validate(graph, functions, comm_graphs);
  Builder builder(functions, comm_graphs);
  GraphOwner built = builder.build(graph);
  MadeGraphs::get().add_built(built.get(), builder.small_graphs());
  return built.release();
}

}  // namespace foundryd::graphs
