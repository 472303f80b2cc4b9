// SPDX-License-Identifier: Apache-2.0
//
// Attributes of kernel nodes: which there are, and how many bytes of each mean something.
#ifndef FOUNDRYD_HOOK_GRAPHS_ATTRIBUTES_H
#define FOUNDRYD_HOOK_GRAPHS_ATTRIBUTES_H

#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "foundryd/records.h"
#include "graphs/made.h"
#include "support/cuda.h"

namespace foundryd::graphs {

// Reads the attributes of a graph's kernel nodes.
class AttributeReader {
 public:
  // Those that differ from what a new node of this function has, by ascending id: functions come with attributes of
  // their own (a cluster size), and the manual does not name every default.  Throws Error for one that cannot be
  // restored.
  std::vector<fdy_attribute> read(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 &params);

 private:
  const std::vector<fdy_attribute> &defaults(const CUDA_KERNEL_NODE_PARAMS_v2 &params);

  std::optional<GraphOwner> scratch_;
  std::unordered_map<const void *, std::vector<fdy_attribute>> defaults_;  // by function
};

// Whether a graph node may have this attribute; launch-only ones hold handles or have become edges.
bool is_node_attribute(uint32_t id);

void write_attributes(CUgraphNode node, std::span<const fdy_attribute> attributes);

bool is_cooperative(std::span<const fdy_attribute> attributes);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_ATTRIBUTES_H
