// SPDX-License-Identifier: Apache-2.0
//
// The part of the fdy_hook table that is about graphs.
#include "graphs/build.h"
#include "graphs/made.h"
#include "graphs/read.h"
#include "interpose/concepts.h"
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

int api_build_graph(const fdy_graph *graph, const uint64_t *functions, uint64_t function_count,
                    void *const *comm_graphs, uint64_t comm_graph_count, void **out) {
  return guard_api([&] {
    require(graph && out, "the graph or the result");
    require((functions || function_count == 0) && (comm_graphs || comm_graph_count == 0), "an array of handles");
    *out = build_graph(*graph, {functions, function_count}, {comm_graphs, comm_graph_count});
  });
}

int api_destroy_graph(void *graph) {
  return guard_api([&] { destroy_made_graph(static_cast<CUgraph>(graph)); });
}

}  // namespace

void fill(fdy_hook &table) {
  table.read_graph = api_read_graph;
  table.free_graph = api_free_graph;
  table.build_graph = api_build_graph;
  table.destroy_graph = api_destroy_graph;
}

}  // namespace foundryd::graphs
