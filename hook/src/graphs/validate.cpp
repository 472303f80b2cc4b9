// SPDX-License-Identifier: Apache-2.0
#include "graphs/validate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "graphs/attributes.h"
#include "graphs/made.h"
#include "graphs/read.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

using ull = unsigned long long;

bool within(uint64_t first, uint64_t count, uint64_t limit) {
  return first <= limit && count <= limit - first;
}

[[noreturn]] void bad(size_t node, const char *what, uint64_t value, uint64_t limit) {
  throw Error(FDY_ERROR_INVALID, "node %zu has %s %llu, and there are %llu: the graph is damaged", node, what,
              static_cast<ull>(value), static_cast<ull>(limit));
}

void check_struct(size_t i, const fdy_node &node, size_t bytes) {
  if (node.param_kind != FDY_PARAM_STRUCT || node.param_bytes != bytes)
    throw Error(FDY_ERROR_INVALID,
                "node %zu of type %u has %u parameter bytes of kind %u, not a struct of %zu: the graph "
                "is damaged",
                i, node.type, node.param_bytes, node.param_kind, bytes);
}

void check_copy(size_t i, const uint8_t *bytes) {
  CUDA_MEMCPY3D_v2 params;
  std::memcpy(&params, bytes, sizeof params);
  // A damaged value is one that the enumeration cannot hold, so it is looked at as the number that it is.
  std::array<uint32_t, 2> types{};
  static_assert(sizeof params.srcMemoryType == sizeof types[0]);
  std::memcpy(&types[0], &params.srcMemoryType, sizeof types[0]);
  std::memcpy(&types[1], &params.dstMemoryType, sizeof types[1]);
  for (const uint32_t type : types)
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED)
      throw Error(FDY_ERROR_INVALID,
                  "node %zu copies memory of type %u, not host (1), device (2) or unified (4): the "
                  "graph is damaged",
                  i, type);
  if (params.reserved0 != nullptr || params.reserved1 != nullptr || params.srcArray != nullptr ||
      params.dstArray != nullptr)
    throw Error(FDY_ERROR_INVALID, "node %zu is a copy with an array or reserved field set: the graph is damaged", i);
}

void check_kernel(size_t i, const fdy_node &node, const fdy_graph &graph, std::span<const uint64_t> functions) {
  if (node.function >= functions.size()) bad(i, "function", node.function, functions.size());
  if (functions[node.function] == 0)
    throw Error(FDY_ERROR_INVALID, "node %zu uses function %u, whose handle is 0: load it first", i, node.function);
  if (node.param_kind != FDY_PARAM_NONE && node.param_kind != FDY_PARAM_LIST && node.param_kind != FDY_PARAM_EXTRA)
    throw Error(FDY_ERROR_INVALID, "node %zu is a kernel with parameters of kind %u: the graph is damaged", i,
                node.param_kind);
  for (uint32_t k = 0; k < node.attribute_count; ++k) {
    const uint32_t id = graph.attributes[node.attribute_first + k].id;
    if (!is_node_attribute(id))
      throw Error(FDY_ERROR_INVALID, "node %zu has attribute %u, which a graph node cannot have: the graph is damaged",
                  i, id);
  }
}

void check_node(size_t i, const fdy_node &node, const fdy_graph &graph, std::span<const uint64_t> functions,
                std::span<void *const> comm_graphs) {
  if (!within(node.param_offset, node.param_bytes, graph.param_bytes))
    bad(i, "parameters that end at byte", uint64_t{node.param_offset} + node.param_bytes, graph.param_bytes);
  if (!within(node.attribute_first, node.attribute_count, graph.attribute_count))
    bad(i, "attributes that end at", uint64_t{node.attribute_first} + node.attribute_count, graph.attribute_count);
  switch (node.type) {
    case FDY_NODE_KERNEL:
      check_kernel(i, node, graph, functions);
      break;
    case FDY_NODE_MEMCPY:
      check_struct(i, node, sizeof(CUDA_MEMCPY3D_v2));
      check_copy(i, graph.params + node.param_offset);
      break;
    case FDY_NODE_MEMSET:
      check_struct(i, node, sizeof(CUDA_MEMSET_NODE_PARAMS_v1));
      break;
    case FDY_NODE_EMPTY:
      break;
    case FDY_NODE_CHILD:
      if (node.child >= graph.child_count) bad(i, "child", node.child, graph.child_count);
      break;
    case FDY_NODE_COMM:
      if (node.comm_group >= comm_graphs.size()) bad(i, "communication group", node.comm_group, comm_graphs.size());
      if (!MadeGraphs::get().communicator_of(static_cast<CUgraph>(comm_graphs[node.comm_group])))
        throw Error(FDY_ERROR_INVALID,
                    "node %zu stands for communication group %u, whose graph %p was not made by "
                    "comm_reissue",
                    i, node.comm_group, comm_graphs[node.comm_group]);
      break;
    default:
      throw Error(FDY_ERROR_INVALID, "node %zu has type %u, which does not exist: the graph is damaged", i, node.type);
  }
}

void check_edges(const fdy_graph &graph) {
  const auto pair = [&](uint64_t i) { return std::pair(graph.edges[i].from, graph.edges[i].to); };
  bool ascending = true;  // as archives have them
  for (uint64_t i = 0; i < graph.edge_count; ++i) {
    const fdy_edge &e = graph.edges[i];
    if (e.from >= e.to || e.to >= graph.node_count)
      throw Error(FDY_ERROR_INVALID,
                  "edge %llu goes from node %u to node %u of %llu, not from an earlier to a later one: "
                  "the graph is damaged",
                  static_cast<ull>(i), e.from, e.to, static_cast<ull>(graph.node_count));
    if (e.reserved[0] | e.reserved[1] | e.reserved[2] | e.reserved[3] | e.reserved[4])
      throw Error(FDY_ERROR_INVALID, "edge %llu has reserved bytes set: the graph is damaged", static_cast<ull>(i));
    if (e.type > CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
      throw Error(FDY_ERROR_INVALID, "edge %llu has type %u, which does not exist: the graph is damaged",
                  static_cast<ull>(i), static_cast<unsigned>(e.type));
    ascending = ascending && (i == 0 || pair(i - 1) < pair(i));
  }
  if (ascending) return;
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  pairs.reserve(graph.edge_count);
  for (uint64_t i = 0; i < graph.edge_count; ++i) pairs.push_back(pair(i));
  std::sort(pairs.begin(), pairs.end());
  if (const auto twice = std::adjacent_find(pairs.begin(), pairs.end()); twice != pairs.end())
    throw Error(FDY_ERROR_INVALID, "there are two edges from node %u to node %u: the graph is damaged", twice->first,
                twice->second);
}

void check_arrays(const fdy_graph &graph) {
  if ((graph.node_count != 0 && graph.nodes == nullptr) || (graph.edge_count != 0 && graph.edges == nullptr) ||
      (graph.attribute_count != 0 && graph.attributes == nullptr) ||
      (graph.param_bytes != 0 && graph.params == nullptr) || (graph.child_count != 0 && graph.children == nullptr))
    throw Error(FDY_ERROR_INVALID, "an array of the graph is NULL and its count is not 0: pass the array");
  if (graph.node_count >= FDY_NONE || graph.edge_count >= FDY_NONE)
    throw Error(FDY_ERROR_INVALID, "the graph has %llu nodes and %llu edges: it is damaged",
                static_cast<ull>(graph.node_count), static_cast<ull>(graph.edge_count));
}

}  // namespace

void validate(const fdy_graph &graph, std::span<const uint64_t> functions, std::span<void *const> comm_graphs,
              int depth) {
  if (depth > kMaximumDepth)
    throw Error(FDY_ERROR_INVALID, "child graphs nest more than %d deep: the graph is damaged", kMaximumDepth);
  check_arrays(graph);
  for (uint64_t i = 0; i < graph.node_count; ++i) check_node(i, graph.nodes[i], graph, functions, comm_graphs);
  check_edges(graph);
  for (uint64_t i = 0; i < graph.child_count; ++i) validate(graph.children[i], functions, comm_graphs, depth + 1);
}

void validate_kernel(uint32_t place, const fdy_graph &graph, std::span<const uint64_t> functions) {
  check_arrays(graph);
  if (place >= graph.node_count)
    throw Error(FDY_ERROR_INVALID, "there is no node %u among %llu: pass places of the graph", place,
                static_cast<ull>(graph.node_count));
  const fdy_node &node = graph.nodes[place];
  if (node.type != FDY_NODE_KERNEL)
    throw Error(FDY_ERROR_INVALID, "node %u has type %u, which is no kernel: build the graph again", place, node.type);
  check_node(place, node, graph, functions, {});
}

}  // namespace foundryd::graphs
