// SPDX-License-Identifier: Apache-2.0
#include "comm/group.h"

#include <algorithm>
#include <string>
#include <utility>

#include "comm/state.h"
#include "graphs/edges.h"

namespace foundryd::comm {
namespace {

thread_local int nccl_depth = 0;

bool contains(const std::vector<CUgraphNode> &nodes, CUgraphNode node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

// The nodes that came between two frontiers of a stream, oldest first.  They are a chain: one stream, one after the
// other.
std::vector<CUgraphNode> nodes_between(const graphs::Frontier &before, const graphs::Frontier &after) {
  std::vector<CUgraphNode> found;
  std::vector<CUgraphNode> at = after.nodes;
  while (at.size() == 1 && !contains(before.nodes, at.front()) && found.size() < 1024) {
    found.push_back(at.front());
    at = graphs::dependencies_of(at.front());
    // What stood at the end before is behind us; so is a join with another stream of the same group.
    if (std::any_of(at.begin(), at.end(), [&](CUgraphNode n) { return contains(before.nodes, n); })) break;
  }
  std::reverse(found.begin(), found.end());
  return found;
}

// The slots of `ops` whose placeholder goes on `stream`: NCCL launches a communicator's work on the stream of its last
// call.  In the order of their first call.
std::vector<uint32_t> communicators_on(const std::vector<PendingOp> &ops, CUstream stream) {
  std::vector<uint32_t> slots;
  for (const PendingOp &p : ops) {
    const uint32_t slot = p.op.communicator;
    const auto last = std::find_if(ops.rbegin(), ops.rend(), [&](const PendingOp &q) { return q.op.communicator == slot; });
    if (last->stream == stream && std::find(slots.begin(), slots.end(), slot) == slots.end()) slots.push_back(slot);
  }
  return slots;
}

// Nothing to do, no node: NCCL drops calls with no elements.
bool is_empty(const std::vector<PendingOp> &ops, uint32_t slot) {
  return std::all_of(ops.begin(), ops.end(),
                     [&](const PendingOp &p) { return p.op.communicator != slot || p.op.count == 0; });
}

}  // namespace

Group &group() noexcept {
  static thread_local Group mine;
  return mine;
}

InsideNccl::InsideNccl() noexcept { ++nccl_depth; }
InsideNccl::~InsideNccl() { --nccl_depth; }
bool inside_nccl() noexcept { return nccl_depth != 0; }

Enqueue::Enqueue(std::vector<PendingOp> ops) : ops_(std::move(ops)) {
  for (const PendingOp &p : ops_)
    if (std::none_of(streams_.begin(), streams_.end(), [&](const Stream &s) { return s.handle == p.stream; }))
      streams_.push_back({p.stream, graphs::frontier(p.stream)});
}

void Enqueue::finish() {
  for (const Stream &stream : streams_) {
    if (stream.before.graph == nullptr) continue;  // eager
    std::vector<uint32_t> slots = communicators_on(ops_, stream.handle);
    if (slots.empty()) continue;
    const std::vector<CUgraphNode> nodes = nodes_between(stream.before, graphs::frontier(stream.handle));
    if (nodes.size() < slots.size())
      std::erase_if(slots, [&](uint32_t slot) { return is_empty(ops_, slot); });
    if (nodes.size() != slots.size()) {
      graphs::Creations::get().refuse(
          stream.before.graph, "the communication library added " + std::to_string(nodes.size()) + " nodes for calls on " +
                                   std::to_string(slots.size()) +
                                   " communicators, not one each: capture with foundryd's NCCL stub preloaded");
      continue;
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      const uint32_t id = State::get().next_group();
      std::vector<fdy_comm_op> ops;
      for (const PendingOp &p : ops_) {
        if (p.op.communicator != slots[i]) continue;
        ops.push_back(p.op);
        ops.back().group = id;
        if (p.op.reduction != FDY_NONE && p.op.reduction >= static_cast<uint32_t>(kNcclPredefinedReductions))
          graphs::Creations::get().refuse(stream.before.graph,
                                          "a collective uses reduction " + std::to_string(p.op.reduction) +
                                              ", which the program made itself: use a predefined one");
      }
      State::get().add_ops(ops);
      graphs::Creations::get().note_placeholder(stream.before.graph, nodes[i], id);
    }
  }
}

}  // namespace foundryd::comm
