// SPDX-License-Identifier: Apache-2.0
#ifndef FOUNDRYD_HOOK_COMM_REISSUE_H
#define FOUNDRYD_HOOK_COMM_REISSUE_H

#include <span>

#include "foundryd/records.h"
#include "support/cuda.h"

namespace foundryd::comm {

// Calls NCCL again for the calls of one group, under capture on a private stream, and answers the graph with NCCL's own
// nodes.  Every rank of the communicator must do so, in the same order.  The graph belongs to graphs::MadeGraphs.
CUgraph reissue(std::span<const fdy_comm_op> ops);

}  // namespace foundryd::comm

#endif  // FOUNDRYD_HOOK_COMM_REISSUE_H
