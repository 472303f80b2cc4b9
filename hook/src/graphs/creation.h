// SPDX-License-Identifier: Apache-2.0
//
// What the hook saw while a graph came to be: the order of its nodes, and which of them stand for collectives.
// Records belong to a graph handle from the start of its capture until it is destroyed, so that a reused
// handle never brings back an old record.
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
  std::vector<std::pair<CUgraphNode, uint64_t>> order;  // a handle that was used again counts where it is last
  std::unordered_map<CUgraphNode, uint32_t> groups;     // placeholders, by fdy_comm_op.group
  std::string refusal;                                  // why the graph cannot be read; empty if it can
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

 private:
  mutable std::mutex mutex_;
  uint64_t next_ = 0;
  std::unordered_map<CUgraph, CreationRecord> graphs_;
};

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_CREATION_H
