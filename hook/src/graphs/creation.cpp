// SPDX-License-Identifier: Apache-2.0
#include "graphs/creation.h"

#include "graphs/edges.h"
#include "support/driver.h"

namespace foundryd::graphs {
namespace {

// The clones in a new clone's child nodes have handles that somebody else may have had.
void forget_children(Creations &creations, CUgraph graph) {
  for (CUgraphNode node : nodes_of(graph)) {
    CUgraphNodeType type{};
    FDY_CU(cuGraphNodeGetType, node, &type);
    if (type != CU_GRAPH_NODE_TYPE_GRAPH) continue;
    CUgraph child = nullptr;
    FDY_CU(cuGraphChildGraphNodeGetGraph, node, &child);
    creations.forget(child);
    forget_children(creations, child);
  }
}

}  // namespace

Frontier frontier(CUstream stream) {
  if (stream == nullptr || stream == CU_STREAM_LEGACY) return {};
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph graph = nullptr;
  const CUgraphNode *nodes = nullptr;
  size_t count = 0;
  if (FDY_CU_HAS(cuStreamGetCaptureInfo_v3)) {
    const CUgraphEdgeData *edges = nullptr;  // must be taken where an edge has data
    FDY_CU(cuStreamGetCaptureInfo_v3, stream, &status, nullptr, &graph, &nodes, &edges, &count);
  } else {
    FDY_CU(cuStreamGetCaptureInfo_v2, stream, &status, nullptr, &graph, &nodes, &count);
  }
  if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return {};
  return {graph, {nodes, nodes + count}};
}

Creations &Creations::get() {
  static auto *creations = new Creations;  // never destroyed: the driver may call until the process is gone
  return *creations;
}

void Creations::note(CUgraph graph, std::span<const CUgraphNode> nodes) {
  const std::lock_guard lock(mutex_);
  auto &order = graphs_[graph].order;
  order.insert(order.end(), nodes.begin(), nodes.end());
}

void Creations::note_placeholder(CUgraph graph, CUgraphNode node, uint32_t group) {
  const std::lock_guard lock(mutex_);
  CreationRecord &record = graphs_[graph];
  record.order.push_back(node);
  record.groups.insert_or_assign(node, group);
}

void Creations::refuse(CUgraph graph, const std::string &reason) {
  const std::lock_guard lock(mutex_);
  CreationRecord &record = graphs_[graph];
  if (record.refusal.empty()) record.refusal = reason;
}

void Creations::forget(CUgraph graph) {
  const std::lock_guard lock(mutex_);
  graphs_.erase(graph);
}

Creations::Records::node_type Creations::take(CUgraph graph) {
  const std::lock_guard lock(mutex_);
  return graphs_.extract(graph);
}

void Creations::put_back(Records::node_type record) {
  const std::lock_guard lock(mutex_);
  if (!record.empty()) graphs_.insert(std::move(record));
}

std::vector<std::pair<CUgraph, uint32_t>> Creations::take_node(CUgraphNode node) {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<CUgraph, uint32_t>> found;
  for (auto &[graph, record] : graphs_) {
    const auto it = record.groups.find(node);
    if (it == record.groups.end()) continue;
    found.emplace_back(graph, it->second);
    record.groups.erase(it);
  }
  return found;
}

void Creations::put_back(CUgraphNode node, std::span<const std::pair<CUgraph, uint32_t>> placeholders) {
  const std::lock_guard lock(mutex_);
  for (const auto &[graph, group] : placeholders)
    if (const auto it = graphs_.find(graph); it != graphs_.end()) it->second.groups.insert_or_assign(node, group);
}

void Creations::inherit(CUgraph clone, const CreationRecord &original) {
  if (!original.refusal.empty()) refuse(clone, original.refusal);
  if (original.inside)
    refuse(
        clone,
        "the graph is a clone of one whose child graphs have collectives, which cannot be followed that far: capture "
        "the collectives in the graph itself");
  if (original.groups.empty()) return;
  for (CUgraphNode node : original.order) {
    CUgraphNode here = nullptr;
    const auto group = original.groups.find(node);
    if (FDY_CU_RESULT(cuGraphNodeFindInClone, &here, node, clone) == CUDA_SUCCESS) {
      group == original.groups.end() ? note(clone, {&here, 1}) : note_placeholder(clone, here, group->second);
    } else if (group != original.groups.end()) {
      refuse(clone,
             "the driver does not say which node of a cloned graph is the collective of its original: capture the "
             "collective in the graph itself");
    }
  }
}

void Creations::cloned(CUgraph clone, CUgraph original) {
  forget(clone);
  forget_children(*this, clone);
  inherit(clone, copy(original));
}

void Creations::embedded(CUgraph graph, CUgraphNode node, CUgraph child) {
  const CreationRecord record = copy(child);
  if (!record.refusal.empty()) refuse(graph, record.refusal);
  if (record.inside || !record.groups.empty()) {
    const std::lock_guard lock(mutex_);
    graphs_[graph].inside = true;
  }
  CUgraph held = nullptr;
  FDY_CU(cuGraphChildGraphNodeGetGraph, node, &held);
  if (held == child) return;  // moved, not cloned
  forget(held);
  forget_children(*this, held);
  inherit(held, record);
}

CreationRecord Creations::copy(CUgraph graph) const {
  const std::lock_guard lock(mutex_);
  const auto it = graphs_.find(graph);
  return it == graphs_.end() ? CreationRecord{} : it->second;
}

}  // namespace foundryd::graphs
