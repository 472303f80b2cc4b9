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

// What adding and reading edges needs meanwhile, for who does so again and again.
struct EdgeMemory {
  std::vector<CUgraphNode> from, to;
  std::vector<CUgraphEdgeData> data;
  std::vector<uint32_t> places;  // of edges, of which there are fewer than 2^32 - 1
  std::vector<bool> found;
};

std::vector<CUgraphNode> nodes_of(CUgraph graph);

// In no particular order.
std::vector<Edge> edges_of(CUgraph graph);

// Leaves one edge for each pair of nodes, in the order in which they are given; of those between the same two the last.
void drop_doubles(std::vector<Edge> &edges, EdgeMemory &memory);

// Adds the edges of a graph that has none yet, no two between the same nodes.  Throws Error if the driver made
// something else of them: edges are read back where they have data, since drivers 580 to 610 apply the data of the
// first edge of a call to all of them, and counted where they have none.
void add_edges(CUgraph graph, std::span<const Edge> edges, EdgeMemory &memory);

// What a node depends on.
std::vector<CUgraphNode> dependencies_of(CUgraphNode node);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_EDGES_H
