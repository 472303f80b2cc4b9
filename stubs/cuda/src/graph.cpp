// SPDX-License-Identifier: Apache-2.0
#include "graph.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <unordered_map>
#include <utility>

#include "memory.h"
#include "random.h"

namespace softcuda {

namespace {

bool is_kernel(const Node &node) {
  return node_type(*node.work) == CU_GRAPH_NODE_TYPE_KERNEL;
}

bool same(const CUgraphEdgeData &a, const CUgraphEdgeData &b) {
  return a.from_port == b.from_port && a.to_port == b.to_port && a.type == b.type;
}

void check_edge_data(const Node &from, const Node &to, const CUgraphEdgeData &data) {
  for (const unsigned char byte : data.reserved) require(byte == 0);
  require(data.to_port == 0);
  require(data.type == CU_GRAPH_DEPENDENCY_TYPE_DEFAULT || data.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC);
  require(data.from_port <= CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER);
  if (data.from_port != CU_GRAPH_KERNEL_NODE_PORT_DEFAULT) require(is_kernel(from));
  if (data.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC || data.from_port == CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC) {
    require(data.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC);
    require(is_kernel(from) && is_kernel(to) && data.from_port != CU_GRAPH_KERNEL_NODE_PORT_DEFAULT);
  }
}

Work clone_work(const Work &work, bool registered) {
  if (const auto *child = std::get_if<ChildWork>(&work)) {
    auto graph = clone_graph(*child->graph, registered);
    graph->owned = true;
    return ChildWork{std::move(graph)};
  }
  if (const auto *conditional = std::get_if<ConditionalWork>(&work)) {
    ConditionalWork copy = *conditional;
    for (size_t i = 0; i < copy.bodies.size(); ++i) {
      copy.bodies[i] = clone_graph(*copy.bodies[i], registered);
      copy.bodies[i]->owned = true;
      copy.handles[i] = Handles<Graph, CUgraph>::handle(copy.bodies[i]);
    }
    return copy;
  }
  return work;
}

void destroy_children(const Node &node) {
  if (const auto *alloc = std::get_if<AllocWork>(node.work.get()); alloc != nullptr && node.work.use_count() == 1) {
    ranges().remove(alloc->params.dptr);
  }
  if (const auto *child = std::get_if<ChildWork>(node.work.get())) destroy_graph(child->graph);
  if (const auto *conditional = std::get_if<ConditionalWork>(node.work.get())) {
    for (const auto &body : conditional->bodies) destroy_graph(body);
  }
}

void unlink(Node &from, Node &to) {
  auto &edges = to.dependencies;
  edges.erase(std::remove_if(edges.begin(), edges.end(), [&](const Edge &edge) { return edge.from == &from; }),
              edges.end());
  auto &nodes = from.dependents;
  nodes.erase(std::remove(nodes.begin(), nodes.end(), &to), nodes.end());
}

}  // namespace

CUgraphNodeType node_type(const Work &work) {
  struct {
    CUgraphNodeType operator()(const KernelWork &) { return CU_GRAPH_NODE_TYPE_KERNEL; }
    CUgraphNodeType operator()(const CopyWork &) { return CU_GRAPH_NODE_TYPE_MEMCPY; }
    CUgraphNodeType operator()(const FillWork &) { return CU_GRAPH_NODE_TYPE_MEMSET; }
    CUgraphNodeType operator()(const HostWork &) { return CU_GRAPH_NODE_TYPE_HOST; }
    CUgraphNodeType operator()(const ChildWork &) { return CU_GRAPH_NODE_TYPE_GRAPH; }
    CUgraphNodeType operator()(const EmptyWork &) { return CU_GRAPH_NODE_TYPE_EMPTY; }
    CUgraphNodeType operator()(const WaitWork &) { return CU_GRAPH_NODE_TYPE_WAIT_EVENT; }
    CUgraphNodeType operator()(const RecordWork &) { return CU_GRAPH_NODE_TYPE_EVENT_RECORD; }
    CUgraphNodeType operator()(const AllocWork &) { return CU_GRAPH_NODE_TYPE_MEM_ALLOC; }
    CUgraphNodeType operator()(const FreeWork &) { return CU_GRAPH_NODE_TYPE_MEM_FREE; }
    CUgraphNodeType operator()(const BatchWork &) { return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP; }
    CUgraphNodeType operator()(const ConditionalWork &) { return CU_GRAPH_NODE_TYPE_CONDITIONAL; }
  } type;
  return std::visit(type, work);
}

std::shared_ptr<Graph> make_graph() {
  auto graph = process().graphs.make();
  graph->id = process().next_id++;
  return graph;
}

std::shared_ptr<Graph> clone_graph(const Graph &from, bool registered) {
  auto graph = registered ? make_graph() : std::make_shared<Graph>();
  if (!registered) graph->id = process().next_id++;
  graph->cloned_from = from.id;
  graph->conditionals = from.conditionals;
  std::unordered_map<const Node *, Node *> copies;
  for (const auto &node : from.nodes) {
    auto copy = registered ? process().nodes.make() : std::make_shared<Node>();
    copy->id = process().next_id++;
    copy->parent = node->id;
    copy->graph = graph;
    copy->work = std::holds_alternative<ChildWork>(*node->work) || std::holds_alternative<ConditionalWork>(*node->work)
                     ? std::make_shared<const Work>(clone_work(*node->work, registered))
                     : node->work;
    copy->attributes = node->attributes;
    copies.emplace(node.get(), copy.get());
    graph->nodes.push_back(std::move(copy));
  }
  for (const auto &node : from.nodes) {
    Node *copy = copies.at(node.get());
    for (const Edge &edge : node->dependencies) copy->dependencies.push_back({copies.at(edge.from), edge.data});
    for (const Node *dependent : node->dependents) copy->dependents.push_back(copies.at(dependent));
  }
  graph->user_objects = from.user_objects;
  for (const auto &[object, count] : graph->user_objects) retain_user_object(*object, count);
  return graph;
}

void destroy_graph(const std::shared_ptr<Graph> &graph) {
  for (const auto &node : graph->nodes) {
    destroy_children(*node);
    process().nodes.remove(node.get());
    // An event may still hold the node as something to depend on.
    node->graph.reset();
    node->dependencies.clear();
    node->dependents.clear();
  }
  graph->nodes.clear();
  release_user_objects(*graph);
  process().graphs.remove(graph.get());
}

std::shared_ptr<Node> add_node(const std::shared_ptr<Graph> &graph, Work work, Attributes attributes) {
  auto node = process().nodes.make();
  node->id = process().next_id++;
  node->graph = graph;
  node->work = std::make_shared<const Work>(std::move(work));
  node->attributes = std::move(attributes);
  graph->nodes.push_back(node);
  return node;
}

void remove_node(Graph &graph, const std::shared_ptr<Node> &node) {
  while (!node->dependencies.empty()) unlink(*node->dependencies.back().from, *node);
  while (!node->dependents.empty()) unlink(*node, *node->dependents.back());
  destroy_children(*node);
  node->graph.reset();
  process().nodes.remove(node.get());
  graph.nodes.erase(std::remove(graph.nodes.begin(), graph.nodes.end(), node), graph.nodes.end());
}

std::shared_ptr<Graph> graph_at(CUgraph handle) {
  return process().graphs.get(handle, CUDA_ERROR_INVALID_VALUE);
}

std::shared_ptr<Node> node_at(CUgraphNode handle) {
  return process().nodes.get(handle, CUDA_ERROR_INVALID_VALUE);
}

bool plain(const CUgraphEdgeData &data) {
  return same(data, CUgraphEdgeData{});
}

void add_edge(Node &from, Node &to, const CUgraphEdgeData &data) {
  const auto graph = from.graph.lock();
  require(graph != nullptr && graph == to.graph.lock() && &from != &to);
  for (const Edge &edge : to.dependencies) require(edge.from != &from);
  check_edge_data(from, to, data);
  to.dependencies.push_back({&from, data});
  from.dependents.push_back(&to);
}

void remove_edge(Node &from, Node &to, const CUgraphEdgeData *data) {
  const auto it = std::find_if(to.dependencies.begin(), to.dependencies.end(), [&](const Edge &edge) {
    return edge.from == &from && (data == nullptr ? plain(edge.data) : same(edge.data, *data));
  });
  require(it != to.dependencies.end());
  unlink(from, to);
}

std::shared_ptr<Node> add_node_after(CUgraph handle, const CUgraphNode *dependencies, const CUgraphEdgeData *data,
                                     size_t count, Work work) {
  const auto graph = graph_at(handle);
  require(count == 0 || dependencies != nullptr);
  std::vector<std::shared_ptr<Node>> before;
  for (size_t i = 0; i < count; ++i) {
    before.push_back(node_at(dependencies[i]));
    require(before.back()->graph.lock() == graph);
  }
  auto node = add_node(graph, std::move(work));
  try {
    for (size_t i = 0; i < count; ++i) add_edge(*before[i], *node, data == nullptr ? CUgraphEdgeData{} : data[i]);
  } catch (const Failure &) {
    remove_node(*graph, node);
    throw;
  }
  return node;
}

std::vector<Node *> topological(const Graph &graph) {
  std::unordered_map<const Node *, size_t> place;
  std::vector<size_t> open(graph.nodes.size());
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    place.emplace(graph.nodes[i].get(), i);
    open[i] = graph.nodes[i]->dependencies.size();
    if (open[i] == 0) ready.push(i);
  }
  std::vector<Node *> order;
  order.reserve(graph.nodes.size());
  while (!ready.empty()) {
    const size_t next = ready.top();
    ready.pop();
    order.push_back(graph.nodes[next].get());
    for (const Node *dependent : graph.nodes[next]->dependents) {
      const size_t i = place.at(dependent);
      if (--open[i] == 0) ready.push(i);
    }
  }
  if (order.size() != graph.nodes.size()) order.clear();
  return order;
}

std::vector<Node *> shuffled(const Graph &graph) {
  std::vector<Node *> nodes;
  for (const auto &node : graph.nodes) nodes.push_back(node.get());
  std::sort(nodes.begin(), nodes.end(),
            [](const Node *a, const Node *b) { return shuffled_rank(a->id) < shuffled_rank(b->id); });
  return nodes;
}

}  // namespace softcuda
