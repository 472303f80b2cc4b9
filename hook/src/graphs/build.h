// SPDX-License-Identifier: Apache-2.0
#ifndef FOUNDRYD_HOOK_GRAPHS_BUILD_H
#define FOUNDRYD_HOOK_GRAPHS_BUILD_H

#include <cstdint>
#include <span>

#include "foundryd/hook.h"
#include "support/cuda.h"

namespace foundryd::graphs {

// Builds a graph from arrays, which may come from anywhere: they are validated first.  Needs a current context.  The
// result belongs to MadeGraphs; on failure nothing is left.
CUgraph build_graph(const fdy_graph &graph, std::span<const uint64_t> functions, std::span<void *const> comm_graphs);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_BUILD_H
