// SPDX-License-Identifier: Apache-2.0
//
// Executable graphs.  The snapshot is the graph as it was instantiated and updated since; the program is what a
// launch runs, made from the snapshot when needed and never changed, so that launches in flight keep theirs.
#ifndef SOFTCUDA_GRAPH_EXEC_H
#define SOFTCUDA_GRAPH_EXEC_H

#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "graph.h"
#include "stream.h"

namespace softcuda {

struct Step {
  std::shared_ptr<const Work> work;
  std::vector<uint32_t> after;  // earlier steps
  uint32_t lane = 0;
  bool awaited = false;  // by a step of another lane
};

// Steps in topological order, dealt to lanes that run concurrently: branches of a graph do not wait for each other.
struct Program {
  std::vector<Step> steps;
  uint32_t lanes = 1;
};

struct GraphExec {
  std::shared_ptr<Graph> snapshot;                 // its nodes have no handles
  std::unordered_map<uint64_t, Node *> by_origin;  // by the id of the node that the program knows
  std::weak_ptr<Graph> counted_by;                 // the graph with allocation nodes that it was made of
  std::set<const Node *> disabled;
  uint64_t flags = 0;
  bool on_device = false;                  // it was uploaded or launched
  std::shared_ptr<const Program> program;  // null after a change
  Mark last;                               // of the latest launch: the next one waits for it
};

std::shared_ptr<GraphExec> exec_at(CUgraphExec handle);
// The snapshot's node for a node of the program's graph.
Node &exec_node(GraphExec &exec, CUgraphNode handle);
void index_snapshot(GraphExec &exec);

std::shared_ptr<const Program> make_program(const GraphExec &exec);
void launch_program(GraphExec &exec, Stream &stream);

struct UpdateResult {
  CUgraphExecUpdateResult result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  CUgraphNode node = nullptr;
  CUgraphNode from = nullptr;
};
// Pairs the nodes of two graphs as the manual describes and, if every change is allowed, makes `target` like
// `source`, but for attributes of kernels.  Otherwise `target` is left as it was.
UpdateResult update_graph(Graph &target, const Graph &source, uint64_t flags, bool on_device);

}  // namespace softcuda

#endif  // SOFTCUDA_GRAPH_EXEC_H
