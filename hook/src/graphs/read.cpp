// SPDX-License-Identifier: Apache-2.0
#include "graphs/read.h"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>

#include "graphs/attributes.h"
#include "graphs/creation.h"
#include "graphs/edges.h"
#include "graphs/node_params.h"
#include "graphs/order.h"
#include "modules/functions.h"
#include "support/driver.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

const char *type_name(CUgraphNodeType type) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return "kernel";
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return "memcpy";
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return "memset";
    case CU_GRAPH_NODE_TYPE_HOST:
      return "host";
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return "child graph";
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return "empty";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return "external event wait";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return "external event record";
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
      return "external semaphore signal";
    case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
      return "external semaphore wait";
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
      return "memory allocation";
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return "memory free";
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return "batch memory operation";
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      return "conditional";
    default:
      return "unknown";
  }
}

// What one node says, before nodes have places.
struct NodeContent {
  CUgraphNodeType type{};
  fdy_node record{};
  std::optional<modules::UsedFunction> function;
  ParamBytes params;
  std::vector<fdy_attribute> attributes;
  std::unique_ptr<OwnedGraph> child;
  std::optional<Error> error;

  std::string label() const {
    const std::string kind = record.type == FDY_NODE_COMM ? "collective" : type_name(type);
    return function ? kind + " " + function->name : kind;
  }
};

CUdevice device_of(CUcontext context) {
  CUdevice device = 0;
  CUcontext popped = nullptr;
  FDY_CU(cuCtxPushCurrent_v2, context);
  const CUresult code = FDY_CU_RESULT(cuCtxGetDevice, &device);
  FDY_CU(cuCtxPopCurrent_v2, &popped);
  driver::check(code, "cuCtxGetDevice");
  return device;
}

// A restored node runs where its graph is built.
void refuse_other_device(CUcontext context, const std::string &kernel) {
  CUcontext current = nullptr;
  FDY_CU(cuCtxGetCurrent, &current);
  if (context == nullptr || current == nullptr || context == current) return;
  const CUdevice theirs = device_of(context), ours = device_of(current);
  if (theirs != ours)
    throw Error(
        FDY_ERROR_UNSUPPORTED,
        "kernel %s runs on device %d in a graph that is read on device %d, and a restore would run all of it on "
        "one: use one device in a process",
        kernel.c_str(), theirs, ours);
}

void read_kernel(CUgraphNode node, AttributeReader &attributes, NodeContent &out) {
  CUDA_KERNEL_NODE_PARAMS_v2 params{};
  FDY_CU(cuGraphKernelNodeGetParams_v2, node, &params);
  out.function = modules::inspect_function(params.func, params.kern);
  refuse_other_device(params.ctx, out.function->name);
  out.record.grid[0] = params.gridDimX;
  out.record.grid[1] = params.gridDimY;
  out.record.grid[2] = params.gridDimZ;
  out.record.block[0] = params.blockDimX;
  out.record.block[1] = params.blockDimY;
  out.record.block[2] = params.blockDimZ;
  out.record.shared_bytes = params.sharedMemBytes;
  out.params = kernel_params(params, *out.function);
  out.attributes = attributes.read(node, params);
}

void read_content(CUgraphNode node, const CreationRecord &created, AttributeReader &attributes, int depth,
                  NodeContent &out) {
  out.record.function = out.record.comm_group = out.record.child = FDY_NONE;
  FDY_CU(cuGraphNodeGetType, node, &out.type);
  if (const auto it = created.groups.find(node); it != created.groups.end()) {
    out.record.type = FDY_NODE_COMM;
    out.record.comm_group = it->second;
    return;
  }
  switch (out.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      out.record.type = FDY_NODE_KERNEL;
      read_kernel(node, attributes, out);
      return;
    case CU_GRAPH_NODE_TYPE_MEMCPY: {
      out.record.type = FDY_NODE_MEMCPY;
      CUDA_MEMCPY3D_v2 params{};
      FDY_CU(cuGraphMemcpyNodeGetParams, node, &params);
      out.params = memcpy_params(params);
      return;
    }
    case CU_GRAPH_NODE_TYPE_MEMSET: {
      out.record.type = FDY_NODE_MEMSET;
      CUDA_MEMSET_NODE_PARAMS_v1 params{};
      FDY_CU(cuGraphMemsetNodeGetParams, node, &params);
      out.params = memset_params(params);
      return;
    }
    case CU_GRAPH_NODE_TYPE_EMPTY:
      out.record.type = FDY_NODE_EMPTY;
      return;
    case CU_GRAPH_NODE_TYPE_GRAPH: {
      out.record.type = FDY_NODE_CHILD;
      CUgraph child = nullptr;
      FDY_CU(cuGraphChildGraphNodeGetGraph, node, &child);
      out.child = read_graph(child, depth + 1);
      return;
    }
    default:
      throw Error(FDY_ERROR_UNSUPPORTED, "a node of type %s (%d) cannot be restored: capture without it",
                  type_name(out.type), static_cast<int>(out.type));
  }
}

std::string_view text_of(const void *data, size_t bytes) {
  return {static_cast<const char *>(data), bytes};
}

// What every rank that runs the program has in common; function and sizes of members differ too, but nodes that differ
// in them differ in nothing that creation order does not decide.
uint64_t shape_of(const NodeContent &c) {
  uint64_t hash = mix(mix(1, c.record.type), c.type);
  if (c.function) hash = mix(hash, c.function->name);
  for (int i = 0; i < 3; ++i) hash = mix(mix(hash, c.record.grid[i]), c.record.block[i]);
  hash = mix(mix(hash, c.record.shared_bytes), c.params.bytes.size());
  for (const fdy_attribute &a : c.attributes) hash = mix(mix(hash, a.id), text_of(a.value, sizeof a.value));
  if (c.child) {
    hash = mix(mix(hash, c.child->node_count), c.child->edge_count);
    for (const fdy_node &n : c.child->node_store) hash = mix(mix(hash, n.type), n.param_bytes);
  }
  return hash;
}

std::string bytes_of(const NodeContent &c) {
  std::string out(text_of(&c.record.comm_group, sizeof c.record.comm_group));
  out += text_of(c.params.bytes.data(), c.params.bytes.size());
  if (c.child) out += text_of(c.child->param_store.data(), c.child->param_store.size());
  return out;
}

// Says where the node stands, in the words of somebody who looks for it in the program.
Error placed(const Error &error, size_t place, size_t count, const std::string &before) {
  if (error.status() != FDY_ERROR_UNSUPPORTED && error.status() != FDY_ERROR_NOT_FOUND) return error;
  return Error(error.status(), "node %zu of %zu (%s%.120s): %s", place, count,
               before.empty() ? "at the start" : "after ", before.c_str(), error.what());
}

void append(OwnedGraph &graph, NodeContent &c) {
  fdy_node record = c.record;
  if (c.function) record.function = modules::use_function(*c.function, record.shared_bytes);
  record.param_kind = c.params.kind;
  record.param_offset = static_cast<uint32_t>(graph.param_store.size());
  record.param_bytes = static_cast<uint32_t>(c.params.bytes.size());
  record.attribute_first = static_cast<uint32_t>(graph.attribute_store.size());
  record.attribute_count = static_cast<uint32_t>(c.attributes.size());
  graph.param_store.insert(graph.param_store.end(), c.params.bytes.begin(), c.params.bytes.end());
  // Blocks start at multiples of 16, so that a mapped archive can be used where it lies.
  graph.param_store.resize((graph.param_store.size() + 15) / 16 * 16);
  graph.attribute_store.insert(graph.attribute_store.end(), c.attributes.begin(), c.attributes.end());
  if (c.child) {
    record.child = static_cast<uint32_t>(graph.child_store.size());
    graph.child_store.push_back(std::move(c.child));
  }
  graph.node_store.push_back(record);
}

}  // namespace

void OwnedGraph::point() {
  child_views.clear();
  for (const auto &child : child_store) child_views.push_back(*child);
  nodes = node_store.data();
  node_count = node_store.size();
  edges = edge_store.data();
  edge_count = edge_store.size();
  attributes = attribute_store.data();
  attribute_count = attribute_store.size();
  params = param_store.data();
  param_bytes = param_store.size();
  children = child_views.data();
  child_count = child_views.size();
}

std::unique_ptr<OwnedGraph> read_graph(CUgraph graph, int depth) {
  if (depth > kMaximumDepth)
    throw Error(FDY_ERROR_UNSUPPORTED, "child graphs nest more than %d deep: flatten the graph", kMaximumDepth);
  const CreationRecord created = Creations::get().copy(graph);
  if (!created.refusal.empty()) throw Error(FDY_ERROR_UNSUPPORTED, "%s", created.refusal.c_str());

  const std::vector<CUgraphNode> nodes = nodes_of(graph);
  std::unordered_map<CUgraphNode, uint64_t> creation;
  for (size_t i = 0; i < created.order.size(); ++i) creation.insert_or_assign(created.order[i], i);
  std::unordered_map<CUgraphNode, uint32_t> index;
  std::vector<NodeContent> contents(nodes.size());
  std::vector<OrderNode> order_nodes(nodes.size());
  AttributeReader attributes;
  for (uint32_t i = 0; i < nodes.size(); ++i) {
    index.emplace(nodes[i], i);
    try {
      read_content(nodes[i], created, attributes, depth, contents[i]);
    } catch (const Error &error) {
      contents[i].error = error;  // reported by place, which is known only when all are read
    }
    const auto it = creation.find(nodes[i]);
    order_nodes[i] = {it == creation.end() ? kUnknownCreation : it->second, shape_of(contents[i]),
                      bytes_of(contents[i])};
  }

  std::vector<OrderEdge> order_edges;
  const std::vector<Edge> edges = edges_of(graph);
  for (const Edge &e : edges) {
    const auto from = index.find(e.from), to = index.find(e.to);
    if (from == index.end() || to == index.end())
      throw Error(FDY_ERROR_STATE, "the graph changed while it was read: read it when its capture has ended");
    order_edges.push_back(
        {from->second, to->second, static_cast<uint32_t>(e.from_port << 16 | e.to_port << 8 | e.type)});
  }
  const std::vector<uint32_t> order = canonical_order(order_nodes, order_edges);
  if (order.size() != nodes.size()) throw Error(FDY_ERROR_STATE, "the graph has a cycle: read it when it is complete");

  auto out = std::make_unique<OwnedGraph>();
  std::vector<uint32_t> place(nodes.size());
  std::string before;
  for (uint32_t at = 0; at < order.size(); ++at) {
    NodeContent &content = contents[order[at]];
    if (content.error) throw placed(*content.error, at, order.size(), before);
    place[order[at]] = at;
    before = content.label();
    append(*out, content);
  }
  for (size_t i = 0; i < edges.size(); ++i)
    out->edge_store.push_back({place[order_edges[i].from],
                               place[order_edges[i].to],
                               edges[i].from_port,
                               edges[i].to_port,
                               edges[i].type,
                               {}});
  std::sort(out->edge_store.begin(), out->edge_store.end(), [](const fdy_edge &a, const fdy_edge &b) {
    return std::tie(a.from, a.to, a.from_port, a.to_port, a.type) <
           std::tie(b.from, b.to, b.from_port, b.to_port, b.type);
  });
  out->point();
  return out;
}

}  // namespace foundryd::graphs
