// SPDX-License-Identifier: Apache-2.0
//
// The CUgraphs that the hook made and has not destroyed.  Handles from outside are looked up here before use.
#ifndef FOUNDRYD_HOOK_GRAPHS_MADE_H
#define FOUNDRYD_HOOK_GRAPHS_MADE_H

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "support/cuda.h"

namespace foundryd::graphs {

class MadeGraphs {
 public:
  static MadeGraphs &get();

  // A small graph of one re-issued group on the communicator with this slot.
  void add_small(CUgraph graph, uint32_t communicator);
  // A built graph; its kernels' state lives in the small graphs that it was built from.  Throws Error if one of those
  // was destroyed meanwhile.
  void add_built(CUgraph graph, const std::vector<CUgraph> &small_graphs);

  // The communicator of a small graph, nullopt if `graph` is none.
  std::optional<uint32_t> communicator_of(CUgraph graph) const;

  // Forgets a graph that is about to be destroyed.  Throws Error for one that the hook did not make, and for a small
  // graph that a built one still uses.
  void remove(CUgraph graph);

 private:
  struct Made {
    std::optional<uint32_t> communicator;
    std::vector<CUgraph> uses;
    uint32_t users = 0;
  };
  mutable std::mutex mutex_;
  std::unordered_map<CUgraph, Made> graphs_;
};

// A CUgraph that is destroyed unless it is released.
class GraphOwner {
 public:
  explicit GraphOwner(CUgraph graph) : graph_(graph) {}
  GraphOwner(GraphOwner &&other) noexcept : graph_(other.release()) {}
  GraphOwner &operator=(GraphOwner &&) = delete;
  ~GraphOwner();
  CUgraph get() const { return graph_; }
  CUgraph release() {
    CUgraph graph = graph_;
    graph_ = nullptr;
    return graph;
  }

 private:
  CUgraph graph_;
};

GraphOwner create_graph();
void destroy_made_graph(CUgraph graph);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_MADE_H
