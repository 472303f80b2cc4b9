// SPDX-License-Identifier: Apache-2.0
#include "comm/group.h"

#include <algorithm>
#include <string>
#include <utility>

#include "comm/state.h"
#include "graphs/edges.h"
#include "memory/arenas.h"

namespace foundryd::comm {
namespace {

thread_local int nccl_depth = 0;

bool contains(const std::vector<CUgraphNode> &nodes, CUgraphNode node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

// The nodes that came onto a stream since `known`, oldest first.  They are a chain: one stream, one after the other.  A
// node that depends on something known ends it, be it where the stream stood or a join with another stream.
std::vector<CUgraphNode> nodes_since(const std::vector<CUgraphNode> &known, const graphs::Frontier &after) {
  std::vector<CUgraphNode> found;
  std::vector<CUgraphNode> at = after.nodes;
  while (at.size() == 1 && !contains(known, at.front())) {
    found.push_back(at.front());
    at = graphs::dependencies_of(at.front());
    if (std::any_of(at.begin(), at.end(), [&](CUgraphNode n) { return contains(known, n); })) break;
  }
  std::reverse(found.begin(), found.end());
  return found;
}

// The streams of a communicator's calls, in the order of first use.
std::vector<CUstream> streams_of(const std::vector<PendingOp> &ops, uint32_t slot) {
  std::vector<CUstream> streams;
  for (const PendingOp &p : ops)
    if (p.op.communicator == slot && std::find(streams.begin(), streams.end(), p.stream) == streams.end())
      streams.push_back(p.stream);
  return streams;
}

// The communicators whose placeholder goes on `stream`, in the order of their first call.  NCCL launches a
// communicator's work on the stream that joined the group last.
std::vector<uint32_t> communicators_on(const std::vector<PendingOp> &ops, CUstream stream) {
  std::vector<uint32_t> slots;
  for (const PendingOp &p : ops) {
    const uint32_t slot = p.op.communicator;
    if (std::find(slots.begin(), slots.end(), slot) == slots.end() && streams_of(ops, slot).back() == stream)
      slots.push_back(slot);
  }
  return slots;
}

}  // namespace

Group &group() noexcept {
  static thread_local Group mine;
  return mine;
}

InsideNccl::InsideNccl() noexcept {
  ++nccl_depth;
}
InsideNccl::~InsideNccl() {
  --nccl_depth;
}
bool inside_nccl() noexcept {
  return nccl_depth != 0;
}

Enqueue::Enqueue(std::vector<PendingOp> ops) : ops_(std::move(ops)) {
  for (const PendingOp &p : ops_)
    if (std::none_of(streams_.begin(), streams_.end(), [&](const Stream &s) { return s.handle == p.stream; }))
      streams_.push_back({p.stream, graphs::frontier(p.stream)});
}

void Enqueue::finish() {
  std::vector<CUgraphNode> known;  // where the streams stood, and placeholders found since
  for (const Stream &stream : streams_)
    known.insert(known.end(), stream.before.nodes.begin(), stream.before.nodes.end());
  for (const Stream &stream : streams_) {
    if (stream.before.graph == nullptr) continue;  // eager
    const std::vector<uint32_t> slots = communicators_on(ops_, stream.handle);
    if (slots.empty()) continue;
    const std::vector<CUgraphNode> nodes = nodes_since(known, graphs::frontier(stream.handle));
    if (nodes.size() != slots.size()) {
      graphs::Creations::get().refuse(stream.before.graph,
                                      "the communication library added " + std::to_string(nodes.size()) +
                                          " nodes for calls on " + std::to_string(slots.size()) +
                                          " communicators, not one each: capture with foundryd's NCCL stub preloaded");
      continue;
    }
    for (size_t i = 0; i < slots.size(); ++i) record(stream.before.graph, nodes[i], slots[i]);
    known.insert(known.end(), nodes.begin(), nodes.end());
  }
}

void Enqueue::record(CUgraph graph, CUgraphNode placeholder, uint32_t slot) const {
  const uint32_t id = State::get().next_group();
  std::vector<fdy_comm_op> ops;
  for (const PendingOp &p : ops_) {
    if (p.op.communicator != slot) continue;
    ops.push_back(p.op);
    ops.back().group = id;
    for (const uint64_t buffer : {p.op.send, p.op.recv})
      if (const char *what = memory::foreign_memory(buffer, 1))
        graphs::Creations::get().refuse(graph, std::string("a buffer of a collective is ") + what);
    if (p.op.reduction != FDY_NONE && p.op.reduction >= static_cast<uint32_t>(kNcclPredefinedReductions))
      graphs::Creations::get().refuse(graph, "a collective uses reduction " + std::to_string(p.op.reduction) +
                                                 ", which the program made itself: use a predefined one");
  }
  State::get().add_ops(ops);
  graphs::Creations::get().note_placeholder(graph, placeholder, id);
}

}  // namespace foundryd::comm
