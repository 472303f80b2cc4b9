// SPDX-License-Identifier: Apache-2.0
#include "graphs/edges.h"

#include <algorithm>
#include <tuple>

#include "support/driver.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

auto kind(const Edge &e) {
  return std::tuple(e.from_port, e.to_port, e.type);
}

// One call for one kind of edge.
void add_run(CUgraph graph, const Edge *first, const Edge *last) {
  std::vector<CUgraphNode> from, to;
  std::vector<CUgraphEdgeData> data;
  for (const Edge *e = first; e != last; ++e) {
    from.push_back(e->from);
    to.push_back(e->to);
    data.push_back({e->from_port, e->to_port, e->type, {}});
  }
  if (FDY_CU_HAS(cuGraphAddDependencies_v2)) {
    FDY_CU(cuGraphAddDependencies_v2, graph, from.data(), to.data(), data.data(), from.size());
  } else if (kind(*first) == std::tuple(0, 0, 0)) {
    FDY_CU(cuGraphAddDependencies, graph, from.data(), to.data(), from.size());
  } else {
    throw Error(FDY_ERROR_UNSUPPORTED,
                "the graph has edges of type %u and this driver has no edge data: use driver 545 "
                "or newer",
                static_cast<unsigned>(first->type));
  }
}

}  // namespace

std::vector<CUgraphNode> nodes_of(CUgraph graph) {
  size_t count = 0;
  FDY_CU(cuGraphGetNodes, graph, nullptr, &count);
  std::vector<CUgraphNode> nodes(count);
  if (count != 0) FDY_CU(cuGraphGetNodes, graph, nodes.data(), &count);
  nodes.resize(std::min(count, nodes.size()));
  return nodes;
}

std::vector<Edge> edges_of(CUgraph graph) {
  const bool with_data = FDY_CU_HAS(cuGraphGetEdges_v2);
  size_t count = 0;
  if (with_data) {
    FDY_CU(cuGraphGetEdges_v2, graph, nullptr, nullptr, nullptr, &count);
  } else {
    FDY_CU(cuGraphGetEdges, graph, nullptr, nullptr, &count);
  }
  std::vector<CUgraphNode> from(count), to(count);
  std::vector<CUgraphEdgeData> data(count);
  if (count != 0) {
    if (with_data) {
      FDY_CU(cuGraphGetEdges_v2, graph, from.data(), to.data(), data.data(), &count);
    } else {
      FDY_CU(cuGraphGetEdges, graph, from.data(), to.data(), &count);
    }
  }
  std::vector<Edge> edges;
  edges.reserve(from.size());
  for (size_t i = 0; i < std::min(count, from.size()); ++i)
    edges.push_back({from[i], to[i], data[i].from_port, data[i].to_port, data[i].type});
  return edges;
}

void add_edges(CUgraph graph, std::vector<Edge> edges) {
  std::stable_sort(edges.begin(), edges.end(), [](const Edge &a, const Edge &b) { return kind(a) < kind(b); });
  for (size_t first = 0; first < edges.size();) {
    size_t last = first;
    while (last < edges.size() && kind(edges[last]) == kind(edges[first])) ++last;
    add_run(graph, edges.data() + first, edges.data() + last);
    first = last;
  }
  std::vector<Edge> made = edges_of(graph);
  std::sort(made.begin(), made.end());
  std::sort(edges.begin(), edges.end());
  if (made != edges)
    throw Error(FDY_ERROR_DRIVER,
                "the driver made %zu edges out of %zu, or gave some of them other data than they were "
                "added with: this driver cannot hold the graph",
                made.size(), edges.size());
}

std::vector<CUgraphNode> dependencies_of(CUgraphNode node) {
  size_t count = 0;
  std::vector<CUgraphNode> nodes;
  if (FDY_CU_HAS(cuGraphNodeGetDependencies_v2)) {
    FDY_CU(cuGraphNodeGetDependencies_v2, node, nullptr, nullptr, &count);
    nodes.resize(count);
    std::vector<CUgraphEdgeData> data(count);  // must be taken where an edge has data
    if (count != 0) FDY_CU(cuGraphNodeGetDependencies_v2, node, nodes.data(), data.data(), &count);
  } else {
    FDY_CU(cuGraphNodeGetDependencies, node, nullptr, &count);
    nodes.resize(count);
    if (count != 0) FDY_CU(cuGraphNodeGetDependencies, node, nodes.data(), &count);
  }
  return nodes;
}

}  // namespace foundryd::graphs
