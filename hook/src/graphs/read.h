// SPDX-License-Identifier: Apache-2.0
#ifndef FOUNDRYD_HOOK_GRAPHS_READ_H
#define FOUNDRYD_HOOK_GRAPHS_READ_H

#include <memory>
#include <vector>

#include "foundryd/hook.h"
#include "support/cuda.h"

namespace foundryd::graphs {

// Children nest no deeper than this: they are read and built by recursion.
inline constexpr int kMaximumDepth = 16;

// An fdy_graph that owns what it points to.
struct OwnedGraph : fdy_graph {
  std::vector<fdy_node> node_store;
  std::vector<fdy_edge> edge_store;
  std::vector<fdy_attribute> attribute_store;
  std::vector<uint8_t> param_store;
  std::vector<std::unique_ptr<OwnedGraph>> child_store;
  std::vector<fdy_graph> child_views;

  OwnedGraph() : fdy_graph{} {}
  void point();  // sets the pointers of fdy_graph
};

// Reads a graph with its nodes in canonical order (see order.h).  Throws Error UNSUPPORTED for a node that cannot be
// restored exactly, with its type and place.
std::unique_ptr<OwnedGraph> read_graph(CUgraph graph, int depth = 0);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_READ_H
