// SPDX-License-Identifier: Apache-2.0
#include "graphs/creation.h"

#include "support/driver.h"

namespace foundryd::graphs {

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
  order.reserve(order.size() + nodes.size());
  for (CUgraphNode node : nodes) order.emplace_back(node, next_++);
}

void Creations::note_placeholder(CUgraph graph, CUgraphNode node, uint32_t group) {
  const std::lock_guard lock(mutex_);
  CreationRecord &record = graphs_[graph];
  record.order.emplace_back(node, next_++);
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

CreationRecord Creations::copy(CUgraph graph) const {
  const std::lock_guard lock(mutex_);
  const auto it = graphs_.find(graph);
  return it == graphs_.end() ? CreationRecord{} : it->second;
}

}  // namespace foundryd::graphs
