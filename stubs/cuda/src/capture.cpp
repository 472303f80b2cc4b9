// SPDX-License-Identifier: Apache-2.0
#include "capture.h"

#include <algorithm>
#include <unordered_set>

#include "context.h"
#include "event.h"

namespace softcuda {

namespace {

std::unordered_set<const Node *> ancestors(const std::vector<Dependency> &frontier) {
  std::unordered_set<const Node *> seen;
  std::vector<const Node *> open;
  for (const Dependency &dependency : frontier) open.push_back(dependency.node.get());
  while (!open.empty()) {
    const Node *node = open.back();
    open.pop_back();
    if (!seen.insert(node).second) continue;
    for (const Edge &edge : node->dependencies) open.push_back(edge.from);
  }
  return seen;
}

// Every stream that joined must have been joined again by the stream that began, also one that is gone.
bool joined(const Capture &capture) {
  const auto reached = ancestors(capture.origin->frontier);
  const auto reaches = [&](const std::vector<Dependency> &frontier) {
    return std::all_of(frontier.begin(), frontier.end(), [&](const Dependency &dependency) {
      // A node that was taken out of the graph is nobody's to join.
      return reached.count(dependency.node.get()) != 0 || dependency.node->graph.lock() != capture.graph;
    });
  };
  return reaches(capture.left_behind) && std::all_of(capture.streams.begin(), capture.streams.end(),
                                                     [&](const Stream *stream) { return reaches(stream->frontier); });
}

void merge(std::vector<Dependency> &frontier, const std::vector<Dependency> &more) {
  for (const Dependency &dependency : more) {
    const bool known = std::any_of(frontier.begin(), frontier.end(),
                                   [&](const Dependency &other) { return other.node == dependency.node; });
    if (!known) frontier.push_back(dependency);
  }
}

std::vector<Dependency> read_dependencies(const Graph &graph, const CUgraphNode *nodes, const CUgraphEdgeData *data,
                                          size_t count) {
  require(count == 0 || nodes != nullptr);
  std::vector<Dependency> out;
  for (size_t i = 0; i < count; ++i) {
    auto node = node_at(nodes[i]);
    require(node->graph.lock().get() == &graph);
    merge(out, {{std::move(node), data == nullptr ? CUgraphEdgeData{} : data[i]}});
  }
  return out;
}

std::shared_ptr<Capture> begin(CUstream hStream, CUstreamCaptureMode mode, std::shared_ptr<Graph> into) {
  require(mode == CU_STREAM_CAPTURE_MODE_GLOBAL || mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
          mode == CU_STREAM_CAPTURE_MODE_RELAXED);
  const auto stream = resolve_stream(hStream);
  require(!stream->legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  require(stream->capture == nullptr, CUDA_ERROR_ILLEGAL_STATE);
  auto capture = std::make_shared<Capture>();
  capture->id = process().next_id++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->context = stream->context;
  capture->own_graph = into == nullptr;
  capture->graph = into == nullptr ? make_graph() : std::move(into);
  capture->origin = stream.get();
  capture->streams.insert(stream.get());
  stream->capture = capture;
  stream->frontier.clear();
  process().captures.push_back(capture);
  ++counters().captures;
  return capture;
}

void end(CUstream hStream, CUgraph *out) {
  require(out != nullptr);
  const auto stream = resolve_stream(hStream);
  const auto capture = stream->capture;
  require(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
    // The capture is over all the same: the right thread finds none.
    end_capture(capture);
    if (capture->own_graph) destroy_graph(capture->graph);
    throw Failure{CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD};
  }
  if (capture->origin != stream.get()) {
    invalidate(*capture);
    throw Failure{CUDA_ERROR_STREAM_CAPTURE_UNMATCHED};
  }
  *out = nullptr;
  const CUresult result = capture->invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                          : !joined(*capture)  ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                               : CUDA_SUCCESS;
  end_capture(capture);
  if (result == CUDA_SUCCESS) {
    *out = Handles<Graph, CUgraph>::handle(capture->graph);
    return;
  }
  if (capture->own_graph) destroy_graph(capture->graph);
  throw Failure{result};
}

bool lossy(const Stream &stream) {
  return std::any_of(stream.frontier.begin(), stream.frontier.end(),
                     [](const Dependency &dependency) { return !plain(dependency.data); });
}

void info(CUstream hStream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes,
          const CUgraphEdgeData **edges, size_t *count) {
  require(status != nullptr && (edges == nullptr || nodes != nullptr));
  const auto stream = resolve_stream(hStream);
  if (stream->capture == nullptr) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return;
  }
  if (stream->capture->invalidated) {
    *status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return;
  }
  if (nodes != nullptr && edges == nullptr) require(!lossy(*stream), CUDA_ERROR_LOSSY_QUERY);
  stream->shown_nodes.clear();
  stream->shown_edges.clear();
  for (const Dependency &dependency : stream->frontier) {
    stream->shown_nodes.push_back(Handles<Node, CUgraphNode>::handle(dependency.node));
    stream->shown_edges.push_back(dependency.data);
  }
  *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (id != nullptr) *id = stream->capture->id;
  if (graph != nullptr) *graph = Handles<Graph, CUgraph>::handle(stream->capture->graph);
  if (nodes != nullptr) *nodes = stream->shown_nodes.data();
  if (edges != nullptr) *edges = stream->shown_edges.data();
  if (count != nullptr) *count = stream->shown_nodes.size();
}

void update_dependencies(CUstream hStream, const CUgraphNode *nodes, const CUgraphEdgeData *data, size_t count,
                         unsigned flags) {
  require(flags == CU_STREAM_ADD_CAPTURE_DEPENDENCIES || flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES);
  const auto stream = resolve_stream(hStream);
  require(capturing(*stream), CUDA_ERROR_ILLEGAL_STATE);
  auto given = read_dependencies(*stream->capture->graph, nodes, data, count);
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) {
    stream->frontier = std::move(given);
  } else {
    merge(stream->frontier, given);
  }
}

}  // namespace

void invalidate(Capture &capture) {
  capture.invalidated = true;
}

void refuse_under_capture() {
  const CUstreamCaptureMode mode = this_thread().capture_mode;
  if (mode == CU_STREAM_CAPTURE_MODE_RELAXED) return;
  bool refused = false;
  for (const auto &capture : process().captures) {
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool forbids = mine ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                              : mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!forbids) continue;
    invalidate(*capture);
    refused = true;
  }
  require(!refused, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

bool capturing(const Stream &stream) {
  if (stream.capture == nullptr) return false;
  require(!stream.capture->invalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  return true;
}

void refuse_capturing(Stream &stream) {
  if (stream.capture == nullptr) return;
  invalidate(*stream.capture);
  throw Failure{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
}

std::shared_ptr<Node> capture_work(Stream &stream, Work work, Attributes attributes) {
  auto node = add_node(stream.capture->graph, std::move(work), std::move(attributes));
  for (const Dependency &dependency : stream.frontier) {
    // The program may have taken the node out of the graph in the meantime.
    if (dependency.node->graph.lock() != stream.capture->graph) continue;
    CUgraphEdgeData data = dependency.data;
    // Only a kernel can start while its predecessor still runs.
    if (node_type(*node->work) != CU_GRAPH_NODE_TYPE_KERNEL) data = {};
    add_edge(*dependency.node, *node, data);
  }
  stream.frontier = {{node, {}}};
  return node;
}

std::shared_ptr<Capture> capture_of(const Event &event) {
  auto capture = event.capture.lock();
  const auto &all = process().captures;
  return std::find(all.begin(), all.end(), capture) == all.end() ? nullptr : capture;
}

void join_capture(Stream &stream, const Event &event) {
  const auto capture = capture_of(event);
  if (capture == nullptr) {
    if (stream.capture != nullptr) invalidate(*stream.capture);
    throw Failure{CUDA_ERROR_INVALID_VALUE};
  }
  require(!capture->invalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  if (stream.legacy) {
    invalidate(*capture);
    throw Failure{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT};
  }
  if (stream.capture == nullptr) {
    stream.capture = capture;
    stream.frontier = event.dependencies;
    capture->streams.insert(&stream);
    return;
  }
  if (stream.capture != capture) {
    invalidate(*stream.capture);
    invalidate(*capture);
    throw Failure{CUDA_ERROR_STREAM_CAPTURE_MERGE};
  }
  merge(stream.frontier, event.dependencies);
}

void end_capture(const std::shared_ptr<Capture> &capture) {
  for (Stream *stream : capture->streams) {
    stream->capture.reset();
    stream->frontier.clear();
    stream->shown_nodes.clear();
    stream->shown_edges.clear();
  }
  capture->streams.clear();
  auto &all = process().captures;
  all.erase(std::remove(all.begin(), all.end(), capture), all.end());
}

void leave_capture(Stream &stream) {
  const auto capture = stream.capture;
  if (capture == nullptr) return;
  if (capture->origin == &stream) {
    const auto graph = capture->own_graph ? capture->graph : nullptr;
    end_capture(capture);
    if (graph != nullptr) destroy_graph(graph);
    return;
  }
  capture->streams.erase(&stream);
  capture->left_behind.insert(capture->left_behind.end(), stream.frontier.begin(), stream.frontier.end());
  stream.capture.reset();
  stream.frontier.clear();
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
  return locked_call([&] { begin(hStream, mode, nullptr); });
}

SOFTCUDA_API cuStreamBeginCapture(CUstream hStream) {
  return locked_call([&] { begin(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL, nullptr); });
}

SOFTCUDA_API cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
                                         const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                         CUstreamCaptureMode mode) {
  return locked_call([&] {
    const auto graph = graph_at(hGraph);
    auto frontier = read_dependencies(*graph, dependencies, dependencyData, numDependencies);
    const auto capture = begin(hStream, mode, graph);
    capture->origin->frontier = std::move(frontier);
  });
}

SOFTCUDA_API cuStreamEndCapture(CUstream hStream, CUgraph *phGraph) {
  return locked_call([&] { end(hStream, phGraph); });
}

SOFTCUDA_API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  return locked_call([&] {
    require(mode != nullptr &&
            (*mode == CU_STREAM_CAPTURE_MODE_GLOBAL || *mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
             *mode == CU_STREAM_CAPTURE_MODE_RELAXED));
    std::swap(*mode, this_thread().capture_mode);
  });
}

SOFTCUDA_API cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out) {
  return locked_call([&] { info(hStream, captureStatus_out, id_out, nullptr, nullptr, nullptr, nullptr); });
}

SOFTCUDA_API cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
                                       CUgraph *graph_out, const CUgraphNode **dependencies_out,
                                       size_t *numDependencies_out) {
  return locked_call(
      [&] { info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, nullptr, numDependencies_out); });
}

SOFTCUDA_API cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
                                       CUgraph *graph_out, const CUgraphNode **dependencies_out,
                                       const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out) {
  return locked_call([&] {
    info(hStream, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out, numDependencies_out);
  });
}

SOFTCUDA_API cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode *dependencies, size_t numDependencies,
                                               unsigned int flags) {
  return locked_call([&] { update_dependencies(hStream, dependencies, nullptr, numDependencies, flags); });
}

SOFTCUDA_API cuStreamUpdateCaptureDependencies_v2(CUstream hStream, CUgraphNode *dependencies,
                                                  const CUgraphEdgeData *dependencyData, size_t numDependencies,
                                                  unsigned int flags) {
  return locked_call([&] { update_dependencies(hStream, dependencies, dependencyData, numDependencies, flags); });
}
