// SPDX-License-Identifier: Apache-2.0
//
// A topological order of a graph's nodes that is the same in every process that runs the same program, whatever order
// the driver lists nodes and edges in.
//
// Among the nodes that are ready, the one that the program created first comes first.  The hook knows the creation
// order of kernels and collectives (see creation.h).  A node that it did not see being made (a memcpy, say) is
// due just before the first known node that needs it.  What is still tied is decided by shape (type, sizes and the
// same of the neighbourhood), by the places of the node's predecessors, and by its bytes, in this order: values
// that may differ between ranks decide only between nodes that nothing else tells apart.
#ifndef FOUNDRYD_GRAPHS_ORDER_H
#define FOUNDRYD_GRAPHS_ORDER_H

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace foundryd::graphs {

inline constexpr uint64_t kUnknownCreation = UINT64_MAX;

struct OrderNode {
  uint64_t creation = kUnknownCreation;  // any increasing number
  uint64_t shape = 0;                    // hash of what ranks and processes have in common
  std::string bytes;                     // everything else that tells two nodes apart
};

struct OrderEdge {
  uint32_t from;
  uint32_t to;
  uint32_t kind;  // ports and type
};

// The nodes' indices in canonical order; shorter than `nodes` if the edges have a cycle or an index out of range.
std::vector<uint32_t> canonical_order(std::span<const OrderNode> nodes, std::span<const OrderEdge> edges);

// For building `shape`.
uint64_t mix(uint64_t hash, uint64_t value);
uint64_t mix(uint64_t hash, std::string_view text);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_GRAPHS_ORDER_H
