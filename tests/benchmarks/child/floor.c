// SPDX-License-Identifier: Apache-2.0
//
// The driver calls of a graph and nothing else: what building it has to cost at least.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
  uint32_t type, function, grid[3], block[3], shared_bytes, param_kind, param_offset, param_bytes;
  uint32_t attribute_first, attribute_count, comm_group, child;
} node_t;
typedef struct {
  uint32_t from, to;
  uint8_t from_port, to_port, type, reserved[5];
} edge_t;
typedef struct {
  uint32_t id, reserved;
  uint8_t value[64];
} attribute_t;
typedef struct {
  void *function;
  uint32_t grid[3], block[3], shared_bytes;
  void **list, **extra;
  void *kernel, *context;
} kernel_params_t;
typedef struct {
  uint8_t from_port, to_port, type, reserved[5];
} edge_data_t;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

// Milliseconds of CPU time of building in out[0], of instantiating in out[1]; the result of the first call that failed.
// Graph and executable live as long as the process, as in an engine.  Function i takes the parameters at
// offsets[first[i]] to offsets[first[i + 1]].
int floor_cost(const node_t *nodes, size_t node_count, const edge_t *edges, size_t edge_count,
               const attribute_t *attributes, uint8_t *params, void *const *functions, const uint32_t *offsets,
               const uint32_t *first, double *out) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  int (*create)(void **, unsigned) = dlsym(driver, "cuGraphCreate");
  int (*add)(void **, void *, void *const *, size_t, const kernel_params_t *) =
      dlsym(driver, "cuGraphAddKernelNode_v2");
  int (*set)(void *, int, const void *) = dlsym(driver, "cuGraphKernelNodeSetAttribute");
  int (*join)(void *, void *const *, void *const *, const edge_data_t *, size_t) =
      dlsym(driver, "cuGraphAddDependencies_v2");
  int (*instantiate)(void **, void *, unsigned long long) = dlsym(driver, "cuGraphInstantiateWithFlags");
  void **made = calloc(node_count, sizeof *made);
  void **from = calloc(edge_count, sizeof *from), **to = calloc(edge_count, sizeof *to);
  edge_data_t *data = calloc(edge_count, sizeof *data);
  void *list[64], *graph = NULL, *executable = NULL;

  const double begin = now();
  int status = create(&graph, 0);
  for (size_t i = 0; i < node_count && status == 0; ++i) {
    const node_t *n = nodes + i;
    const uint32_t low = first[n->function], high = first[n->function + 1];
    for (uint32_t k = low; k < high; ++k) list[k - low] = params + n->param_offset + offsets[k];
    const kernel_params_t p = {functions[n->function],
                               {n->grid[0], n->grid[1], n->grid[2]},
                               {n->block[0], n->block[1], n->block[2]},
                               n->shared_bytes,
                               list,
                               NULL,
                               NULL,
                               NULL};
    status = add(made + i, graph, NULL, 0, &p);
    for (uint32_t k = 0; k < n->attribute_count && status == 0; ++k) {
      const attribute_t *a = attributes + n->attribute_first + k;
      status = set(made[i], (int)a->id, a->value);
    }
  }
  for (size_t i = 0; i < edge_count; ++i) {
    from[i] = made[edges[i].from];
    to[i] = made[edges[i].to];
  }
  if (status == 0) status = join(graph, from, to, data, edge_count);
  const double built = now();
  if (status == 0) status = instantiate(&executable, graph, 0);
  out[0] = built - begin;
  out[1] = now() - built;
  free(made);
  free(from);
  free(to);
  free(data);
  return status;
}
