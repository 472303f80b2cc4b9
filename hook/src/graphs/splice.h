// SPDX-License-Identifier: Apache-2.0
//
// Putting the small graph of a re-issued collective into a graph.
//
// A communication library's collective is: wait for the communicator's event, run the kernel, record the event.  These
// nodes are added one by one, and whoever depends on the collective depends on its kernel, as in a native capture.
// Anything else (host nodes that feed a proxy, several kernels) goes in whole, as a child graph; with
// FOUNDRYD_SPLICE=child everything does.
#ifndef FOUNDRYD_HOOK_GRAPHS_SPLICE_H
#define FOUNDRYD_HOOK_GRAPHS_SPLICE_H

#include <vector>

#include "graphs/edges.h"
#include "support/cuda.h"

namespace foundryd::graphs {

struct Spliced {
  CUgraphNode body;                // what the graph's own edges attach to
  std::vector<CUgraphNode> heads;  // what must wait for an earlier collective of the same communicator
  std::vector<CUgraphNode> tails;  // what a later collective of the same communicator must wait for
  std::vector<CUgraphNode> made;   // every node, in the order of creation
  std::vector<Edge> edges;         // between them, not added yet
};

Spliced splice(CUgraph target, CUgraph small);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_SPLICE_H
