// SPDX-License-Identifier: Apache-2.0
//
// What building a graph needs meanwhile, kept by whoever builds one graph after another: arrays that are allocated anew
// for each graph of some thousand nodes are faulted in anew as well, since a thread's heap gives free memory back.
#ifndef FOUNDRYD_HOOK_GRAPHS_BUILD_MEMORY_H
#define FOUNDRYD_HOOK_GRAPHS_BUILD_MEMORY_H

#include <atomic>
#include <cstddef>
#include <deque>
#include <vector>

#include "graphs/edges.h"
#include "support/cuda.h"
#include "support/error.h"

namespace foundryd::graphs {

class BuildMemory {
 public:
  struct Level {
    std::vector<CUgraphNode> bodies;
    std::vector<CUgraphNode> made;
    std::vector<Edge> edges;
  };

  // For the graph at this depth, children being one deeper.  Stays where it is when a deeper one is asked for.
  Level &level(size_t depth) {
    while (levels_.size() <= depth) levels_.emplace_back();
    Level &level = levels_[depth];
    level.bodies.clear();
    level.made.clear();
    level.edges.clear();
    return level;
  }

  EdgeMemory edges;

  // While one lives, one graph is built with this memory.  Throws Error if another one is.
  class Use {
   public:
    explicit Use(BuildMemory &memory) : memory_(memory) {
      if (memory_.used_.test_and_set(std::memory_order_acquire))
        throw Error(FDY_ERROR_STATE, "two graphs are built with one memory at the same time: make one for each thread");
    }
    ~Use() { memory_.used_.clear(std::memory_order_release); }
    Use(const Use &) = delete;
    Use &operator=(const Use &) = delete;

   private:
    BuildMemory &memory_;
  };

 private:
  std::deque<Level> levels_;
  std::atomic_flag used_;
};

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_BUILD_MEMORY_H
