// SPDX-License-Identifier: Apache-2.0
//
// Edges with their data, past what drivers do to them.
#ifndef FOUNDRYD_HOOK_GRAPHS_EDGES_H
#define FOUNDRYD_HOOK_GRAPHS_EDGES_H

#include <cstdint>
#include <span>
#include <vector>

#include "support/cuda.h"

namespace foundryd::graphs {

struct Edge {
  CUgraphNode from;
  CUgraphNode to;
  uint8_t from_port = 0;
  uint8_t to_port = 0;
  uint8_t type = CU_GRAPH_DEPENDENCY_TYPE_DEFAULT;
  bool operator==(const Edge &) const = default;
};

std::vector<CUgraphNode> nodes_of(CUgraph graph);

// In no particular order.
std::vector<Edge> edges_of(CUgraph graph);

// One edge for each pair of nodes, in the order in which they are given; of edges between the same two the last counts.
std::vector<Edge> without_doubles(std::vector<Edge> edges);

// Adds the edges of a graph that has none yet, no two between the same nodes.  Throws Error if the driver made
// something else of them: edges are read back where they have data, since drivers 580 to 610 apply the data of the
// first edge of a call to all of them, and counted where they have none.
void add_edges(CUgraph graph, std::span<const Edge> edges);

// What a node depends on.
std::vector<CUgraphNode> dependencies_of(CUgraphNode node);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_EDGES_H
