// SPDX-License-Identifier: Apache-2.0
#ifndef FOUNDRYD_HOOK_GRAPHS_BUILD_H
#define FOUNDRYD_HOOK_GRAPHS_BUILD_H

#include <cstdint>
#include <span>
#include <vector>

#include "foundryd/hook.h"
#include "graphs/build_memory.h"
#include "support/cuda.h"

namespace foundryd::graphs {

// Builds a graph from arrays, which may come from anywhere: they are validated first.  Needs a current context.  The
// result belongs to MadeGraphs; on failure nothing is left.  `nodes`, if not NULL, becomes the driver's node for each
// of `graph`; for a placeholder the one that others depend on.
CUgraph build_graph(const fdy_graph &graph, std::span<const uint64_t> functions, std::span<void *const> comm_graphs,
                    BuildMemory &memory, std::vector<CUgraphNode> *nodes = nullptr);

// Gives the kernels `which` of an executable of a built graph the parameters that they have in `graph`, whose nodes are
// those that it was built from.  Throws Error; what came before the failure is changed then.
void set_kernel_params(CUgraphExec executable, const fdy_graph &graph, std::span<const uint64_t> functions,
                       std::span<void *const> nodes, std::span<const uint32_t> which);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_BUILD_H
