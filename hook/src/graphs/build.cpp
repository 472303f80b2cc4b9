// SPDX-License-Identifier: Apache-2.0
#include "graphs/build.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
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
      : functions_(functions), comm_graphs_(comm_graphs), layouts_(functions.size()) {
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
    made.reserve(source.node_count);
    edges.reserve(source.edge_count);
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
    // An edge of the graph may say again what the order of a communicator says; its own data counts, and that is last.
    add_edges(graph.get(), without_doubles(std::move(edges)));
    Creations::get().note(graph.get(), made);
    return graph;
  }

  std::vector<CUgraph> small_graphs() const { return {small_.begin(), small_.end()}; }

 private:
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
    const modules::ParamLayout &layout = layout_of(node.function);
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

    // The driver copies parameters from where they lie.  It only reads them, though its types do not say so.
    auto *block = const_cast<uint8_t *>(bytes);
    size_t size = node.param_bytes;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, block, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    // It refuses a cooperative kernel with `extra`; a list must point into a whole block.
    if (node.param_kind == FDY_PARAM_LIST || (node.param_kind == FDY_PARAM_EXTRA && is_cooperative(attributes))) {
      if (size < layout.bytes) {
        padded_.assign(layout.bytes, 0);
        std::copy(bytes, bytes + size, padded_.begin());
        block = padded_.data();
      }
      list_.clear();
      for (const fdy_field &field : layout.fields) list_.push_back(block + field.offset);
      params.kernelParams = list_.data();
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

  const modules::ParamLayout &layout_of(uint32_t number) {
    std::shared_ptr<const modules::ParamLayout> &layout = layouts_[number];
    if (!layout)
      layout = modules::known_layout(reinterpret_cast<CUfunction>(static_cast<uintptr_t>(functions_[number])));
    return *layout;
  }

  std::span<const uint64_t> functions_;
  std::span<void *const> comm_graphs_;
  CUcontext context_ = nullptr;
  std::vector<std::shared_ptr<const modules::ParamLayout>> layouts_;  // by function, once it was needed
  std::vector<void *> list_;                                          // of one node, kept for its memory
  std::vector<uint8_t> padded_;                                       // likewise
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
