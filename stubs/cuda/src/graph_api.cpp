// SPDX-License-Identifier: Apache-2.0
//
// The structure of graphs: nodes, edges, clones.
#include <algorithm>
#include <cstdio>

#include "capture.h"
#include "graph.h"
#include "random.h"

namespace softcuda {

namespace {

using NodeHandles = Handles<Node, CUgraphNode>;

struct EdgeRow {
  const Node *from;
  const Node *to;
  CUgraphEdgeData data;
};

std::vector<EdgeRow> edge_rows(const Graph &graph) {
  std::vector<EdgeRow> rows;
  for (const Node *node : shuffled(graph)) {
    for (const Edge &edge : node->dependencies) rows.push_back({edge.from, node, edge.data});
  }
  return rows;
}

// Edge data that the caller gives no room for must not get lost.
void refuse_loss(const std::vector<EdgeRow> &rows) {
  const bool all_plain = std::all_of(rows.begin(), rows.end(), [](const EdgeRow &row) { return plain(row.data); });
  require(all_plain, CUDA_ERROR_LOSSY_QUERY);
}

void answer_edges(const std::vector<EdgeRow> &rows, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data,
                  size_t *count) {
  require(count != nullptr);
  if (from == nullptr && to == nullptr) {
    require(data == nullptr);
    *count = rows.size();
    return;
  }
  if (data == nullptr) refuse_loss(rows);
  size_t filled = *count;
  if (from != nullptr) {
    size_t room = *count;
    answer_list(from, &room, rows, [](const EdgeRow &row) { return NodeHandles::handle(row.from); });
    filled = room;
  }
  if (to != nullptr) {
    size_t room = *count;
    answer_list(to, &room, rows, [](const EdgeRow &row) { return NodeHandles::handle(row.to); });
    filled = room;
  }
  if (data != nullptr) {
    size_t room = *count;
    answer_list(data, &room, rows, [](const EdgeRow &row) { return row.data; });
  }
  *count = filled;
}

std::vector<EdgeRow> dependency_rows(CUgraphNode handle) {
  const auto node = node_at(handle);
  std::vector<EdgeRow> rows;
  for (const Edge &edge : node->dependencies) rows.push_back({edge.from, node.get(), edge.data});
  return rows;
}

std::vector<EdgeRow> dependent_rows(CUgraphNode handle) {
  const auto node = node_at(handle);
  std::vector<EdgeRow> rows;
  for (const Node *dependent : node->dependents) {
    for (const Edge &edge : dependent->dependencies) {
      if (edge.from == node.get()) rows.push_back({node.get(), dependent, edge.data});
    }
  }
  return rows;
}

void edit_edges(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t count,
                const CUgraphEdgeData *data, bool add) {
  const auto graph = graph_at(hGraph);
  if (count == 0) return;
  require(from != nullptr && to != nullptr);
  for (size_t i = 0; i < count; ++i) {
    require(node_at(from[i])->graph.lock() == graph && node_at(to[i])->graph.lock() == graph);
  }
  for (size_t i = 0; i < count; ++i) {
    const auto first = node_at(from[i]);
    const auto second = node_at(to[i]);
    if (!add) {
      remove_edge(*first, *second, data == nullptr ? nullptr : &data[i]);
      continue;
    }
    // Drivers 580 to 610 give every edge of one call the data of the first.
    add_edge(*first, *second, data == nullptr ? CUgraphEdgeData{} : data[0]);
  }
}

bool under_capture(const Graph &graph) {
  return std::any_of(process().captures.begin(), process().captures.end(),
                     [&](const auto &capture) { return capture->graph.get() == &graph; });
}

}  // namespace

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuGraphCreate(CUgraph *phGraph, unsigned int flags) {
  return locked_call([&] {
    require(phGraph != nullptr && flags == 0);
    *phGraph = Handles<Graph, CUgraph>::handle(make_graph());
  });
}

SOFTCUDA_API cuGraphDestroy(CUgraph hGraph) {
  return locked_call([&] {
    const auto graph = graph_at(hGraph);
    require(!under_capture(*graph), CUDA_ERROR_ILLEGAL_STATE);
    require(!graph->owned);
    destroy_graph(graph);
  });
}

SOFTCUDA_API cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph) {
  return locked_call([&] {
    require(phGraphClone != nullptr);
    const auto graph = graph_at(originalGraph);
    for (const auto &node : graph->nodes) {
      const CUgraphNodeType type = node_type(*node->work);
      require(type != CU_GRAPH_NODE_TYPE_MEM_ALLOC && type != CU_GRAPH_NODE_TYPE_MEM_FREE, CUDA_ERROR_NOT_SUPPORTED);
    }
    *phGraphClone = Handles<Graph, CUgraph>::handle(clone_graph(*graph, true));
  });
}

SOFTCUDA_API cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph) {
  return locked_call([&] {
    require(phNode != nullptr);
    const auto original = node_at(hOriginalNode);
    const auto clone = graph_at(hClonedGraph);
    const auto it = std::find_if(clone->nodes.begin(), clone->nodes.end(),
                                 [&](const auto &node) { return node->parent == original->id; });
    require(it != clone->nodes.end());
    *phNode = NodeHandles::handle(*it);
  });
}

SOFTCUDA_API cuGraphDestroyNode(CUgraphNode hNode) {
  return locked_call([&] {
    const auto node = node_at(hNode);
    const auto graph = node->graph.lock();
    require(graph != nullptr);
    require(!under_capture(*graph), CUDA_ERROR_ILLEGAL_STATE);
    remove_node(*graph, node);
  });
}

SOFTCUDA_API cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type) {
  return locked_call([&] {
    require(type != nullptr);
    *type = node_type(*node_at(hNode)->work);
  });
}

SOFTCUDA_API cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes) {
  return locked_call([&] {
    require(numNodes != nullptr);
    answer_list(nodes, numNodes, shuffled(*graph_at(hGraph)),
                [](const Node *node) { return NodeHandles::handle(node); });
  });
}

SOFTCUDA_API cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes) {
  return locked_call([&] {
    require(numRootNodes != nullptr);
    auto nodes = shuffled(*graph_at(hGraph));
    nodes.erase(
        std::remove_if(nodes.begin(), nodes.end(), [](const Node *node) { return !node->dependencies.empty(); }),
        nodes.end());
    answer_list(rootNodes, numRootNodes, nodes, [](const Node *node) { return NodeHandles::handle(node); });
  });
}

SOFTCUDA_API cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges) {
  return locked_call([&] { answer_edges(edge_rows(*graph_at(hGraph)), from, to, nullptr, numEdges); });
}

SOFTCUDA_API cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData,
                                size_t *numEdges) {
  return locked_call([&] { answer_edges(edge_rows(*graph_at(hGraph)), from, to, edgeData, numEdges); });
}

SOFTCUDA_API cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies) {
  return locked_call([&] { answer_edges(dependency_rows(hNode), dependencies, nullptr, nullptr, numDependencies); });
}

SOFTCUDA_API cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode *dependencies, CUgraphEdgeData *edgeData,
                                           size_t *numDependencies) {
  return locked_call([&] { answer_edges(dependency_rows(hNode), dependencies, nullptr, edgeData, numDependencies); });
}

SOFTCUDA_API cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode *dependentNodes, size_t *numDependentNodes) {
  return locked_call([&] { answer_edges(dependent_rows(hNode), nullptr, dependentNodes, nullptr, numDependentNodes); });
}

SOFTCUDA_API cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode *dependentNodes, CUgraphEdgeData *edgeData,
                                             size_t *numDependentNodes) {
  return locked_call(
      [&] { answer_edges(dependent_rows(hNode), nullptr, dependentNodes, edgeData, numDependentNodes); });
}

SOFTCUDA_API cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                    size_t numDependencies) {
  return locked_call([&] { edit_edges(hGraph, from, to, numDependencies, nullptr, true); });
}

SOFTCUDA_API cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                       const CUgraphEdgeData *edgeData, size_t numDependencies) {
  return locked_call([&] { edit_edges(hGraph, from, to, numDependencies, edgeData, true); });
}

SOFTCUDA_API cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                       size_t numDependencies) {
  return locked_call([&] { edit_edges(hGraph, from, to, numDependencies, nullptr, false); });
}

SOFTCUDA_API cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
                                          const CUgraphEdgeData *edgeData, size_t numDependencies) {
  return locked_call([&] { edit_edges(hGraph, from, to, numDependencies, edgeData, false); });
}

SOFTCUDA_API cuGraphDebugDotPrint(CUgraph hGraph, const char *path, unsigned int) {
  return locked_call([&] {
    require(path != nullptr);
    const auto graph = graph_at(hGraph);
    const std::unique_ptr<FILE, int (*)(FILE *)> file(std::fopen(path, "w"), std::fclose);
    require(file != nullptr, CUDA_ERROR_OPERATING_SYSTEM);
    std::fputs("digraph dot {\n", file.get());
    for (const auto &node : graph->nodes) {
      std::fprintf(file.get(), "  \"node_%llu\" [label=\"type %d\"];\n", static_cast<unsigned long long>(node->id),
                   static_cast<int>(node_type(*node->work)));
      for (const Edge &edge : node->dependencies) {
        std::fprintf(file.get(), "  \"node_%llu\" -> \"node_%llu\";\n", static_cast<unsigned long long>(edge.from->id),
                     static_cast<unsigned long long>(node->id));
      }
    }
    std::fputs("}\n", file.get());
  });
}
