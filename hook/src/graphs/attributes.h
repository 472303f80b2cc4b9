// SPDX-License-Identifier: Apache-2.0
//
// Attributes of kernel nodes: which there are, how many bytes of each mean something, what their default is.
#ifndef FOUNDRYD_HOOK_GRAPHS_ATTRIBUTES_H
#define FOUNDRYD_HOOK_GRAPHS_ATTRIBUTES_H

#include <span>
#include <vector>

#include "foundryd/records.h"
#include "support/cuda.h"

namespace foundryd::graphs {

// Those that differ from the default, by ascending id.  Throws Error for one that cannot be restored.
std::vector<fdy_attribute> read_attributes(CUgraphNode node);

// Whether a graph node may have this attribute; launch-only ones hold handles or have become edges.
bool is_node_attribute(uint32_t id);

void write_attributes(CUgraphNode node, std::span<const fdy_attribute> attributes);

bool is_cooperative(std::span<const fdy_attribute> attributes);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_ATTRIBUTES_H
