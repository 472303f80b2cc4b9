// SPDX-License-Identifier: Apache-2.0
#ifndef FOUNDRYD_HOOK_GRAPHS_VALIDATE_H
#define FOUNDRYD_HOOK_GRAPHS_VALIDATE_H

#include <cstdint>
#include <span>

#include "foundryd/hook.h"

namespace foundryd::graphs {

// Checks every index, offset and size of a graph from outside, children included, before any of them is used.
// Throws Error INVALID.  Afterwards edges go from earlier to later nodes, each pair at most once.
void validate(const fdy_graph &graph, std::span<const uint64_t> functions, std::span<void *const> comm_graphs,
              int depth = 0);

// The same for one node, which must be a kernel.
void validate_kernel(uint32_t place, const fdy_graph &graph, std::span<const uint64_t> functions);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_VALIDATE_H
