// SPDX-License-Identifier: Apache-2.0
//
// Graphs as they are edited.  A node's work is immutable and replaced as a whole, so that executables share it.
#ifndef SOFTCUDA_GRAPH_H
#define SOFTCUDA_GRAPH_H

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <variant>
#include <vector>

#include "process.h"

namespace softcuda {

struct Allocation;

// The argument block of a kernel.  Its address stays the same; what lies between the arguments is poison.
struct Arguments {
  struct alignas(64) Line {
    std::array<std::byte, 64> bytes;
  };
  std::vector<Line> lines;
  std::vector<void *> pointers;  // one per parameter, into `lines`
  bool from_extra = false;
  size_t extra_bytes = 0;  // what the program passed, at most the block
  std::array<void *, 5> extra{};

  std::byte *data() { return lines.empty() ? nullptr : lines.front().bytes.data(); }
};

struct KernelWork {
  std::shared_ptr<Function> function;  // also of a node that was made with a kernel
  CUcontext context = nullptr;
  std::array<unsigned, 3> grid{};
  std::array<unsigned, 3> block{};
  unsigned shared_bytes = 0;
  std::shared_ptr<Arguments> arguments;
  std::array<unsigned, 3> cluster{1, 1, 1};  // of what runs; a node has it among its attributes
};
struct CopyWork {
  CUDA_MEMCPY3D params{};
  CUcontext context = nullptr;
};
struct FillWork {
  CUDA_MEMSET_NODE_PARAMS params{};
  CUcontext context = nullptr;
};
struct HostWork {
  CUDA_HOST_NODE_PARAMS params{};
};
struct ChildWork {
  std::shared_ptr<Graph> graph;
};
struct EmptyWork {};
struct WaitWork {
  std::shared_ptr<Event> event;
};
struct RecordWork {
  std::shared_ptr<Event> event;
};
struct AllocWork {
  CUDA_MEM_ALLOC_NODE_PARAMS params{};
  std::shared_ptr<Allocation> memory;
};
struct FreeWork {
  CUdeviceptr address = 0;
};
// The next two can be made and looked at; a graph that has one cannot be instantiated.
struct BatchWork {
  CUcontext context = nullptr;
  unsigned flags = 0;
  std::shared_ptr<std::vector<CUstreamBatchMemOpParams>> ops;
};
struct ConditionalWork {
  CUDA_CONDITIONAL_NODE_PARAMS params{};
  std::vector<std::shared_ptr<Graph>> bodies;
  std::vector<CUgraph> handles;
};

using Work = std::variant<KernelWork, CopyWork, FillWork, HostWork, ChildWork, EmptyWork, WaitWork, RecordWork,
                          AllocWork, FreeWork, BatchWork, ConditionalWork>;
using Attributes = std::map<CUlaunchAttributeID, CUlaunchAttributeValue>;

CUgraphNodeType node_type(const Work &work);

struct Edge {
  Node *from;
  CUgraphEdgeData data;
};

struct Node {
  uint64_t id = 0;
  uint64_t parent = 0;  // id of the node that this one was cloned from
  std::weak_ptr<Graph> graph;
  std::shared_ptr<const Work> work;
  Attributes attributes;
  std::vector<Edge> dependencies;  // in the order in which they were added
  std::vector<Node *> dependents;
};

struct Graph {
  uint64_t id = 0;
  uint64_t cloned_from = 0;
  std::vector<std::shared_ptr<Node>> nodes;  // in creation order
  std::map<std::shared_ptr<UserObject>, unsigned> user_objects;
  bool owned = false;        // by a child-graph or conditional node: cannot be destroyed by itself
  unsigned executables = 0;  // made of a graph with allocation nodes: at most one at a time
  std::vector<CUgraphConditionalHandle> conditionals;
};

std::shared_ptr<Graph> make_graph();
// Nodes, edges, attributes, children and references to user objects.  `registered`: the nodes get handles.
std::shared_ptr<Graph> clone_graph(const Graph &from, bool registered);
// Takes a graph and its nodes out of the tables and drops its references to user objects.
void destroy_graph(const std::shared_ptr<Graph> &graph);

std::shared_ptr<Node> add_node(const std::shared_ptr<Graph> &graph, Work work, Attributes attributes = {});
void remove_node(Graph &graph, const std::shared_ptr<Node> &node);

std::shared_ptr<Graph> graph_at(CUgraph handle);
std::shared_ptr<Node> node_at(CUgraphNode handle);
// The work of a node of the given kind; fails on another kind.
template <class Kind>
const Kind &work_of(const Node &node) {
  const Kind *work = std::get_if<Kind>(node.work.get());
  require(work != nullptr);
  return *work;
}

// Adds an edge; fails if it exists, leaves the graph or has data that its ends cannot have.
void add_edge(Node &from, Node &to, const CUgraphEdgeData &data);
void remove_edge(Node &from, Node &to, const CUgraphEdgeData *data);
bool plain(const CUgraphEdgeData &data);

// Adds a node with dependencies, all or nothing.
std::shared_ptr<Node> add_node_after(CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *data,
                                     size_t count, Work work);

// The nodes, dependencies first, else in creation order; empty if there is a cycle.
std::vector<Node *> topological(const Graph &graph);

// Nodes in this process's arbitrary order: the manual promises none.
std::vector<Node *> shuffled(const Graph &graph);

// A count and an optional array, as cuGraphGetNodes and its like answer them.
template <class Out, class In, class Convert>
void answer_list(Out *out, size_t *count, const std::vector<In> &values, Convert convert) {
  if (out == nullptr) {
    *count = values.size();
    return;
  }
  const size_t room = *count;
  for (size_t i = 0; i < room; ++i) out[i] = i < values.size() ? convert(values[i]) : Out{};
  if (values.size() < room) *count = values.size();
}

// User objects.
void retain_user_object(UserObject &object, unsigned count);
void drop_user_object(const std::shared_ptr<UserObject> &object, unsigned count);
void release_user_objects(Graph &graph);

}  // namespace softcuda

#endif  // SOFTCUDA_GRAPH_H
