// SPDX-License-Identifier: Apache-2.0
//
// Launches, captures and instantiations: counted by owner, and followed while a stream is being captured.  Where graphs
// come from and how they end.
#include <string>
#include <utility>
#include <vector>

#include "graphs/creation.h"
#include "interpose/concepts.h"
#include "support/captures.h"
#include "support/counters.h"
#include "support/error.h"
#include "support/log.h"
#include "support/mode.h"

namespace foundryd::graphs {
namespace {

template <class Body>
void record(const char *what, Body &&body) noexcept {
  try {
    body();
  } catch (const std::exception &error) {
    warn("%s was not recorded: %s", what, error.what());
  }
}

CUstream resolved(CUstream stream, Streams meaning) {
  return stream == nullptr && meaning == Streams::per_thread ? CU_STREAM_PER_THREAD : stream;
}

CUresult after_launch(CUresult code, CUstream stream, Streams meaning) noexcept {
  if (code != CUDA_SUCCESS || !overriding()) return code;
  count(&fdy_counters::launches);
  if (capturing() && captures::any())
    record("a captured launch", [&] {
      const Frontier at = frontier(resolved(stream, meaning));
      if (at.graph != nullptr && at.nodes.size() == 1) Creations::get().note(at.graph, at.nodes);
    });
  return code;
}

// A capture makes its graph at once: what was known of an earlier graph with this handle ends here.
CUresult after_begin(CUresult code, CUstream stream, Streams meaning, bool fresh_graph) noexcept {
  if (code != CUDA_SUCCESS || !overriding()) return code;
  captures::began();
  count(&fdy_counters::captures);
  if (capturing() && fresh_graph)
    record("the start of a capture", [&] {
      if (const Frontier at = frontier(resolved(stream, meaning)); at.graph != nullptr)
        Creations::get().forget(at.graph);
    });
  return code;
}

bool is_capturing(CUstream stream, Streams meaning) noexcept {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUstream which = resolved(stream, meaning);
  if (which == nullptr || which == CU_STREAM_LEGACY) return false;
  return FDY_CU_RESULT(cuStreamIsCapturing, which, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

// Some failures end a capture and some do not, so the stream is asked.
template <class Call>
CUresult end_capture(CUstream stream, Streams meaning, Call &&call) noexcept {
  if (!overriding()) return call();
  const bool before = is_capturing(stream, meaning);
  const CUresult code = call();
  if (before && !is_capturing(stream, meaning)) captures::ended();
  return code;
}

// A graph that cannot be followed must not be read: a placeholder that nobody knows as one would pass for a copy.
template <class Body>
void follow(CUgraph graph, const char *what, Body &&body) noexcept {
  try {
    body();
  } catch (const std::exception &error) {
    warn("%s was not recorded: %s", what, error.what());
    record("that a graph cannot be read", [&] {
      Creations::get().refuse(graph, std::string(what) + " could not be followed: see the warning on standard error");
    });
  }
}

CUresult after_child(CUresult code, CUgraph graph, const CUgraphNode *node, CUgraph child) noexcept {
  if (code == CUDA_SUCCESS && overriding() && capturing())
    follow(graph, "a child graph", [&] { Creations::get().embedded(graph, *node, child); });
  return code;
}

CUresult after_node(CUresult code, CUgraph graph, const CUgraphNode *node, const CUgraphNodeParams *params) noexcept {
  return params != nullptr && params->type == CU_GRAPH_NODE_TYPE_GRAPH
             ? after_child(code, graph, node, params->graph.graph)
             : code;
}

CUresult counted(CUresult code, uint64_t fdy_counters::*which) noexcept {
  if (code == CUDA_SUCCESS && overriding()) count(which);
  return code;
}

}  // namespace
}  // namespace foundryd::graphs

using namespace foundryd::graphs;
using foundryd::Streams;

// One line for each pair of functions that differ in the meaning of stream 0 only.
#define FDY_LAUNCH(symbol, meaning)                                                                                   \
  FDY_OVERRIDE CUresult CUDAAPI symbol(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,               \
                                       unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,        \
                                       CUstream stream, void **params, void **extra) {                                \
    return after_launch(FDY_NEXT(symbol, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra), stream, meaning); \
  }
FDY_LAUNCH(cuLaunchKernel, Streams::legacy)
FDY_LAUNCH(cuLaunchKernel_ptsz, Streams::per_thread)

#define FDY_LAUNCH_EX(symbol, meaning)                                                                            \
  FDY_OVERRIDE CUresult CUDAAPI symbol(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) { \
    return after_launch(FDY_NEXT(symbol, config, f, params, extra), config ? config->hStream : nullptr, meaning); \
  }
FDY_LAUNCH_EX(cuLaunchKernelEx, Streams::legacy)
FDY_LAUNCH_EX(cuLaunchKernelEx_ptsz, Streams::per_thread)

#define FDY_LAUNCH_COOPERATIVE(symbol, meaning)                                                                \
  FDY_OVERRIDE CUresult CUDAAPI symbol(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,        \
                                       unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, \
                                       CUstream stream, void **params) {                                       \
    return after_launch(FDY_NEXT(symbol, f, gx, gy, gz, bx, by, bz, shared, stream, params), stream, meaning); \
  }
FDY_LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, Streams::legacy)
FDY_LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, Streams::per_thread)

FDY_OVERRIDE CUresult CUDAAPI cuStreamBeginCapture(CUstream stream) {
  return after_begin(FDY_NEXT(cuStreamBeginCapture, stream), stream, Streams::legacy, true);
}
FDY_OVERRIDE CUresult CUDAAPI cuStreamBeginCapture_ptsz(CUstream stream) {
  return after_begin(FDY_NEXT(cuStreamBeginCapture_ptsz, stream), stream, Streams::per_thread, true);
}
FDY_OVERRIDE CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return after_begin(FDY_NEXT(cuStreamBeginCapture_v2, stream, mode), stream, Streams::legacy, true);
}
FDY_OVERRIDE CUresult CUDAAPI cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  return after_begin(FDY_NEXT(cuStreamBeginCapture_v2_ptsz, stream, mode), stream, Streams::per_thread, true);
}

#define FDY_BEGIN_TO_GRAPH(symbol, meaning)                                                                       \
  FDY_OVERRIDE CUresult CUDAAPI symbol(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,           \
                                       const CUgraphEdgeData *data, size_t count, CUstreamCaptureMode mode) {     \
    return after_begin(FDY_NEXT(symbol, stream, graph, dependencies, data, count, mode), stream, meaning, false); \
  }
FDY_BEGIN_TO_GRAPH(cuStreamBeginCaptureToGraph, Streams::legacy)
FDY_BEGIN_TO_GRAPH(cuStreamBeginCaptureToGraph_ptsz, Streams::per_thread)

FDY_OVERRIDE CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  return end_capture(stream, Streams::legacy, [&] { return FDY_NEXT(cuStreamEndCapture, stream, graph); });
}
FDY_OVERRIDE CUresult CUDAAPI cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
  return end_capture(stream, Streams::per_thread, [&] { return FDY_NEXT(cuStreamEndCapture_ptsz, stream, graph); });
}

FDY_OVERRIDE CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node,
                                                    char *log, size_t log_bytes) {
  return counted(FDY_NEXT(cuGraphInstantiate_v2, exec, graph, error_node, log, log_bytes),
                 &fdy_counters::instantiations);
}
FDY_OVERRIDE CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  return counted(FDY_NEXT(cuGraphInstantiateWithFlags, exec, graph, flags), &fdy_counters::instantiations);
}
FDY_OVERRIDE CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                                           CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  return counted(FDY_NEXT(cuGraphInstantiateWithParams, exec, graph, params), &fdy_counters::instantiations);
}
FDY_OVERRIDE CUresult CUDAAPI cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
                                                                CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
  return counted(FDY_NEXT(cuGraphInstantiateWithParams_ptsz, exec, graph, params), &fdy_counters::instantiations);
}

FDY_OVERRIDE CUresult CUDAAPI cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return counted(FDY_NEXT(cuGraphLaunch, exec, stream), &fdy_counters::graph_launches);
}
FDY_OVERRIDE CUresult CUDAAPI cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
  return counted(FDY_NEXT(cuGraphLaunch_ptsz, exec, stream), &fdy_counters::graph_launches);
}

FDY_OVERRIDE CUresult CUDAAPI cuGraphCreate(CUgraph *graph, unsigned int flags) {
  const CUresult code = FDY_NEXT(cuGraphCreate, graph, flags);
  if (code == CUDA_SUCCESS && foundryd::overriding()) Creations::get().forget(*graph);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuGraphClone(CUgraph *clone, CUgraph original) {
  const CUresult code = FDY_NEXT(cuGraphClone, clone, original);
  if (code == CUDA_SUCCESS && foundryd::overriding() && foundryd::capturing())
    follow(*clone, "a clone of a graph", [&] { Creations::get().cloned(*clone, original); });
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph,
                                                       const CUgraphNode *dependencies, size_t count, CUgraph child) {
  return after_child(FDY_NEXT(cuGraphAddChildGraphNode, node, graph, dependencies, count, child), graph, node, child);
}

FDY_OVERRIDE CUresult CUDAAPI cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                             size_t count, CUgraphNodeParams *params) {
  return after_node(FDY_NEXT(cuGraphAddNode, node, graph, dependencies, count, params), graph, node, params);
}

FDY_OVERRIDE CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                                const CUgraphEdgeData *data, size_t count, CUgraphNodeParams *params) {
  return after_node(FDY_NEXT(cuGraphAddNode_v2, node, graph, dependencies, data, count, params), graph, node, params);
}

FDY_OVERRIDE CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode node) {
  if (!foundryd::overriding()) return FDY_NEXT(cuGraphDestroyNode, node);
  std::vector<std::pair<CUgraph, uint32_t>> placeholders;
  record("the end of a node", [&] { placeholders = Creations::get().take_node(node); });
  const CUresult code = FDY_NEXT(cuGraphDestroyNode, node);
  if (code != CUDA_SUCCESS) record("a node that stays", [&] { Creations::get().put_back(node, placeholders); });
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuGraphDestroy(CUgraph graph) {
  if (!foundryd::overriding()) return FDY_NEXT(cuGraphDestroy, graph);
  auto taken = Creations::get().take(graph);
  const CUresult code = FDY_NEXT(cuGraphDestroy, graph);
  if (code != CUDA_SUCCESS) Creations::get().put_back(std::move(taken));
  return code;
}

namespace foundryd::graphs {

std::span<const Row> rows() {
  static const Row table[] = {
      FDY_ROW_LEGACY_STREAM("cuLaunchKernel", cuLaunchKernel, 4000),
      FDY_ROW_PER_THREAD_STREAM("cuLaunchKernel", cuLaunchKernel_ptsz, 7000),
      FDY_ROW_LEGACY_STREAM("cuLaunchKernelEx", cuLaunchKernelEx, 11060),
      FDY_ROW_PER_THREAD_STREAM("cuLaunchKernelEx", cuLaunchKernelEx_ptsz, 11060),
      FDY_ROW_LEGACY_STREAM("cuLaunchCooperativeKernel", cuLaunchCooperativeKernel, 9000),
      FDY_ROW_PER_THREAD_STREAM("cuLaunchCooperativeKernel", cuLaunchCooperativeKernel_ptsz, 9000),
      FDY_ROW_LEGACY_STREAM("cuStreamBeginCapture", cuStreamBeginCapture, 10000),
      FDY_ROW_PER_THREAD_STREAM("cuStreamBeginCapture", cuStreamBeginCapture_ptsz, 10000),
      FDY_ROW_LEGACY_STREAM("cuStreamBeginCapture", cuStreamBeginCapture_v2, 10010),
      FDY_ROW_PER_THREAD_STREAM("cuStreamBeginCapture", cuStreamBeginCapture_v2_ptsz, 10010),
      FDY_ROW_LEGACY_STREAM("cuStreamBeginCaptureToGraph", cuStreamBeginCaptureToGraph, 12030),
      FDY_ROW_PER_THREAD_STREAM("cuStreamBeginCaptureToGraph", cuStreamBeginCaptureToGraph_ptsz, 12030),
      FDY_ROW_LEGACY_STREAM("cuStreamEndCapture", cuStreamEndCapture, 10000),
      FDY_ROW_PER_THREAD_STREAM("cuStreamEndCapture", cuStreamEndCapture_ptsz, 10000),
      FDY_ROW("cuGraphInstantiate", cuGraphInstantiate_v2, 11000),
      FDY_ROW("cuGraphInstantiate", cuGraphInstantiateWithFlags, 12000),
      FDY_ROW("cuGraphInstantiateWithFlags", cuGraphInstantiateWithFlags, 11040),
      FDY_ROW_LEGACY_STREAM("cuGraphInstantiateWithParams", cuGraphInstantiateWithParams, 12000),
      FDY_ROW_PER_THREAD_STREAM("cuGraphInstantiateWithParams", cuGraphInstantiateWithParams_ptsz, 12000),
      FDY_ROW_LEGACY_STREAM("cuGraphLaunch", cuGraphLaunch, 10000),
      FDY_ROW_PER_THREAD_STREAM("cuGraphLaunch", cuGraphLaunch_ptsz, 10000),
      FDY_ROW("cuGraphCreate", cuGraphCreate, 10000),
      FDY_ROW("cuGraphClone", cuGraphClone, 10000),
      FDY_ROW("cuGraphAddChildGraphNode", cuGraphAddChildGraphNode, 10000),
      FDY_ROW("cuGraphAddNode", cuGraphAddNode, 12020),
      FDY_ROW("cuGraphAddNode", cuGraphAddNode_v2, 12030),
      FDY_ROW("cuGraphDestroyNode", cuGraphDestroyNode, 10000),
      FDY_ROW("cuGraphDestroy", cuGraphDestroy, 10000),
  };
  return table;
}

}  // namespace foundryd::graphs
