// SPDX-License-Identifier: Apache-2.0
//
// The part of the fdy_hook table that is about graphs.
#include <memory>
#include <vector>

#include "graphs/build.h"
#include "graphs/made.h"
#include "graphs/read.h"
#include "interpose/concepts.h"
#include "support/buffer.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

void require(bool condition, const char *what) {
  if (!condition) throw Error(FDY_ERROR_INVALID, "%s is NULL: pass one", what);
}

int api_read_graph(void *graph, fdy_graph **out) {
  return guard_api([&] {
    require(graph && out, "the graph or the result");
    *out = read_graph(static_cast<CUgraph>(graph)).release();
  });
}

void api_free_graph(fdy_graph *graph) {
  delete static_cast<OwnedGraph *>(graph);
}

int api_make_build_memory(void **out) {
  return guard_api([&] {
    require(out, "the result");
    *out = std::make_unique<BuildMemory>().release();
  });
}

void api_free_build_memory(void *memory) {
  delete static_cast<BuildMemory *>(memory);
}

int api_build_graph(const fdy_graph *graph, const uint64_t *functions, uint64_t function_count,
                    void *const *comm_graphs, uint64_t comm_graph_count, void *memory, void **out, fdy_buffer *nodes) {
  return guard_api([&] {
    require(graph && out, "the graph or the result");
    require((functions || function_count == 0) && (comm_graphs || comm_graph_count == 0), "an array of handles");
    std::vector<CUgraphNode> made;
    std::unique_ptr<BuildMemory> own;
    if (memory == nullptr) memory = (own = std::make_unique<BuildMemory>()).get();
    CUgraph built = build_graph(*graph, {functions, function_count}, {comm_graphs, comm_graph_count},
                                *static_cast<BuildMemory *>(memory), nodes == nullptr ? nullptr : &made);
    try {
      if (nodes != nullptr) fill_buffer(nodes, made);
    } catch (...) {
      destroy_made_graph(built);
      throw;
    }
    *out = built;
  });
}

int api_set_kernel_params(void *executable, const fdy_graph *graph, const uint64_t *functions, uint64_t function_count,
                          void *const *nodes, uint64_t node_count, const uint32_t *which, uint64_t which_count) {
  return guard_api([&] {
    require(executable && graph, "the executable or the graph");
    require((functions || function_count == 0) && (nodes || node_count == 0) && (which || which_count == 0),
            "an array of handles or places");
    set_kernel_params(static_cast<CUgraphExec>(executable), *graph, {functions, function_count}, {nodes, node_count},
                      {which, which_count});
  });
}

int api_destroy_graph(void *graph) {
  return guard_api([&] { destroy_made_graph(static_cast<CUgraph>(graph)); });
}

}  // namespace

void fill(fdy_hook &table) {
  table.read_graph = api_read_graph;
  table.free_graph = api_free_graph;
  table.make_build_memory = api_make_build_memory;
  table.free_build_memory = api_free_build_memory;
  table.build_graph = api_build_graph;
  table.set_kernel_params = api_set_kernel_params;
  table.destroy_graph = api_destroy_graph;
}

}  // namespace foundryd::graphs
