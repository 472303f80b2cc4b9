// SPDX-License-Identifier: Apache-2.0
#include "graphs/made.h"

#include "graphs/creation.h"
#include "support/driver.h"
#include "support/error.h"

namespace foundryd::graphs {

MadeGraphs &MadeGraphs::get() {
  static auto *made = new MadeGraphs;
  return *made;
}

void MadeGraphs::add_small(CUgraph graph, uint32_t communicator) {
  const std::lock_guard lock(mutex_);
  graphs_[graph] = {communicator, {}, 0};
}

void MadeGraphs::add_built(CUgraph graph, const std::vector<CUgraph> &small_graphs) {
  const std::lock_guard lock(mutex_);
  for (CUgraph small : small_graphs)
    if (!graphs_.contains(small))
      throw Error(FDY_ERROR_STATE, "small graph %p was destroyed while a graph was built from it: keep it until then",
                  static_cast<void *>(small));
  graphs_[graph] = {std::nullopt, small_graphs, 0};
  for (CUgraph small : small_graphs) ++graphs_[small].users;
}

std::optional<uint32_t> MadeGraphs::communicator_of(CUgraph graph) const {
  const std::lock_guard lock(mutex_);
  const auto it = graphs_.find(graph);
  return it == graphs_.end() ? std::nullopt : it->second.communicator;
}

void MadeGraphs::remove(CUgraph graph) {
  const std::lock_guard lock(mutex_);
  const auto it = graphs_.find(graph);
  if (it == graphs_.end())
    throw Error(FDY_ERROR_INVALID, "graph %p was not made by build_graph or comm_reissue, or is destroyed already",
                static_cast<void *>(graph));
  if (it->second.users != 0)
    throw Error(FDY_ERROR_STATE, "%u built graphs use the kernels of small graph %p: destroy those first",
                it->second.users, static_cast<void *>(graph));
  for (CUgraph small : it->second.uses)
    if (const auto used = graphs_.find(small); used != graphs_.end()) --used->second.users;
  graphs_.erase(it);
}

GraphOwner::~GraphOwner() {
  if (graph_ == nullptr) return;
  Creations::get().forget(graph_);
  FDY_CU_RESULT(cuGraphDestroy, graph_);
}

GraphOwner create_graph() {
  CUgraph graph = nullptr;
  FDY_CU(cuGraphCreate, &graph, 0);
  Creations::get().forget(graph);
  return GraphOwner(graph);
}

void destroy_made_graph(CUgraph graph) {
  MadeGraphs::get().remove(graph);
  Creations::get().forget(graph);
  FDY_CU(cuGraphDestroy, graph);
}

}  // namespace foundryd::graphs
