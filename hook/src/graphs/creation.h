// SPDX-License-Identifier: Apache-2.0
//
// What the hook saw while a graph came to be: the order of its nodes, and which of them stand for collectives.
// Records belong to a graph handle from the moment the driver gives it out until the graph is destroyed, so that a
// reused handle never brings back an old record.  A clone, be it a graph of its own or what a child node holds, has
// what its original had: to the driver, a placeholder is a node like any other, and would be restored as the copy that
// it is.
#ifndef FOUNDRYD_HOOK_GRAPHS_CREATION_H
#define FOUNDRYD_HOOK_GRAPHS_CREATION_H

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "support/cuda.h"

namespace foundryd::graphs {

// Where a capturing stream has got to.
struct Frontier {
  CUgraph graph = nullptr;  // nullptr if the stream is not capturing
  std::vector<CUgraphNode> nodes;
};

// Throws Error if the driver cannot say.  The legacy stream never captures and is not asked.
Frontier frontier(CUstream stream);

struct CreationRecord {
  std::vector<CUgraphNode> order;                    // a handle that was used again counts where it is last
  std::unordered_map<CUgraphNode, uint32_t> groups;  // placeholders, by fdy_comm_op.group
  bool inside = false;                               // some child graph of it has placeholders
  std::string refusal;                               // why the graph cannot be read; empty if it can
};

class Creations {
 public:
  static Creations &get();
  void note(CUgraph graph, std::span<const CUgraphNode> nodes);
  void note_placeholder(CUgraph graph, CUgraphNode node, uint32_t group);
  // The graph has something that the hook could not follow; the first reason stays.
  void refuse(CUgraph graph, const std::string &reason);
  void forget(CUgraph graph);
  CreationRecord copy(CUgraph graph) const;

  using Records = std::unordered_map<CUgraph, CreationRecord>;
  // For a graph that is about to be destroyed: another thread may be given its handle as soon as the driver lets it go.
  Records::node_type take(CUgraph graph);
  void put_back(Records::node_type record);
  // The same for a node; answers with the graphs that had it as a placeholder, and for which group.
  std::vector<std::pair<CUgraph, uint32_t>> take_node(CUgraphNode node);
  void put_back(CUgraphNode node, std::span<const std::pair<CUgraph, uint32_t>> placeholders);

  // `clone` was made of `original`.  What cannot be found again there is refused.  Throws Error.
  void cloned(CUgraph clone, CUgraph original);
  // `node` of `graph` was made to hold `child`, or a clone of it.  Throws Error.
  void embedded(CUgraph graph, CUgraphNode node, CUgraph child);

 private:
  void inherit(CUgraph clone, const CreationRecord &original);

  mutable std::mutex mutex_;
  Records graphs_;
};

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_CREATION_H
