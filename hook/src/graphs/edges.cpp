// SPDX-License-Identifier: Apache-2.0
#include "graphs/edges.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "support/driver.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

auto kind(const Edge &e) {
  return std::tuple(e.from_port, e.to_port, e.type);
}

bool is_plain(const Edge &e) {
  return kind(e) == std::tuple(0, 0, CU_GRAPH_DEPENDENCY_TYPE_DEFAULT);
}

size_t edge_count(CUgraph graph) {
  size_t count = 0;
  if (FDY_CU_HAS(cuGraphGetEdges_v2)) {
    FDY_CU(cuGraphGetEdges_v2, graph, nullptr, nullptr, nullptr, &count);
  } else {
    FDY_CU(cuGraphGetEdges, graph, nullptr, nullptr, &count);
  }
  return count;
}

// One call for the edges that are of the kind of `like`.
void add_run(CUgraph graph, std::span<const Edge> edges, const Edge &like, EdgeMemory &memory) {
  auto &from = memory.from;
  auto &to = memory.to;
  auto &data = memory.data;
  from.clear();
  to.clear();
  from.reserve(edges.size());
  to.reserve(edges.size());
  for (const Edge &e : edges) {
    if (kind(e) != kind(like)) continue;
    from.push_back(e.from);
    to.push_back(e.to);
  }
  data.assign(from.size(), {like.from_port, like.to_port, like.type, {}});
  if (FDY_CU_HAS(cuGraphAddDependencies_v2)) {
    FDY_CU(cuGraphAddDependencies_v2, graph, from.data(), to.data(), data.data(), from.size());
  } else if (is_plain(like)) {
    FDY_CU(cuGraphAddDependencies, graph, from.data(), to.data(), from.size());
  } else {
    throw Error(FDY_ERROR_UNSUPPORTED,
                "the graph has edges of type %u and this driver has no edge data: use driver 545 "
                "or newer",
                static_cast<unsigned>(like.type));
  }
}

// The edges of a graph, in no particular order.
void read_edges(CUgraph graph, EdgeMemory &out) {
  size_t count = edge_count(graph);
  out.from.resize(count);
  out.to.resize(count);
  out.data.resize(count);
  if (count == 0) return;
  if (FDY_CU_HAS(cuGraphGetEdges_v2)) {
    FDY_CU(cuGraphGetEdges_v2, graph, out.from.data(), out.to.data(), out.data.data(), &count);
  } else {
    out.data.assign(count, {});
    FDY_CU(cuGraphGetEdges, graph, out.from.data(), out.to.data(), &count);
  }
  count = std::min(count, out.from.size());
  out.from.resize(count);
  out.to.resize(count);
  out.data.resize(count);
}

Edge edge_at(const EdgeMemory &read, size_t i) {
  const CUgraphEdgeData &data = read.data[i];
  return {read.from[i], read.to[i], data.from_port, data.to_port, data.type};
}

// Whether both have the same edges in any order; there are no two of `wanted` between the same nodes.  By a table with
// open places: sorting both took most of what building a graph of thousands of edges takes outside the driver.
bool same_edges(std::span<const Edge> wanted, EdgeMemory &made) {
  if (wanted.size() != made.from.size()) return false;
  constexpr uint32_t kFree = UINT32_MAX;
  const size_t mask = std::bit_ceil(2 * wanted.size() + 1) - 1;
  auto &table = made.places;  // of `wanted`
  auto &found = made.found;
  table.assign(mask + 1, kFree);
  const auto find = [&](const Edge &e) -> uint32_t & {
    const auto key = reinterpret_cast<uintptr_t>(e.from) * 31 + reinterpret_cast<uintptr_t>(e.to);
    size_t at = static_cast<size_t>((key * 0x9E3779B97F4A7C15) >> 32) & mask;
    while (table[at] != kFree && (wanted[table[at]].from != e.from || wanted[table[at]].to != e.to))
      at = (at + 1) & mask;
    return table[at];
  };
  for (size_t i = 0; i < wanted.size(); ++i) find(wanted[i]) = static_cast<uint32_t>(i);
  found.assign(wanted.size(), false);
  for (size_t i = 0; i < made.from.size(); ++i) {
    const Edge e = edge_at(made, i);
    const uint32_t place = find(e);
    if (place == kFree || found[place] || wanted[place] != e) return false;
    found[place] = true;
  }
  return true;
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
  EdgeMemory read;
  read_edges(graph, read);
  std::vector<Edge> edges;
  edges.reserve(read.from.size());
  for (size_t i = 0; i < read.from.size(); ++i) edges.push_back(edge_at(read, i));
  return edges;
}

void drop_doubles(std::vector<Edge> &edges, EdgeMemory &memory) {
  const auto nodes = [](const Edge &e) { return std::pair(e.from, e.to); };
  // Sorted by address only to bring doubles together: where nodes lie must not decide the order of the result.
  auto &places = memory.places;
  places.resize(edges.size());
  std::iota(places.begin(), places.end(), 0u);
  std::sort(places.begin(), places.end(),
            [&](uint32_t a, uint32_t b) { return std::pair(nodes(edges[a]), a) < std::pair(nodes(edges[b]), b); });
  auto &counts = memory.found;
  counts.assign(edges.size(), true);
  for (size_t i = 1; i < places.size(); ++i)
    if (nodes(edges[places[i - 1]]) == nodes(edges[places[i]])) counts[places[i - 1]] = false;
  size_t kept = 0;
  for (size_t i = 0; i < edges.size(); ++i)
    if (counts[i]) edges[kept++] = edges[i];
  edges.resize(kept);
}

void add_edges(CUgraph graph, std::span<const Edge> edges, EdgeMemory &memory) {
  std::map<decltype(kind(edges[0])), const Edge *> kinds;  // one or two
  for (const Edge &e : edges)
    if (kinds.empty() || kind(*kinds.begin()->second) != kind(e)) kinds.try_emplace(kind(e), &e);
  for (const auto &[unused, first] : kinds) add_run(graph, edges, *first, memory);
  size_t count = 0;
  bool same = false;
  if (std::all_of(edges.begin(), edges.end(), is_plain)) {
    count = edge_count(graph);
    same = count == edges.size();
  } else {
    read_edges(graph, memory);
    count = memory.from.size();
    same = same_edges(edges, memory);
  }
  if (!same)
    throw Error(FDY_ERROR_DRIVER,
                "the driver made %zu edges out of %zu, or gave some of them other data than they were "
                "added with: this driver cannot hold the graph",
                count, edges.size());
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
