// SPDX-License-Identifier: Apache-2.0
//
// The one public interface of libfoundryd_hook.so.  The library is preloaded; nothing links to it.  A client finds
// `fdy_hook_api` with dlsym(RTLD_DEFAULT, ...) and talks through the table that it returns.
//
// Every function answers 0 or an fdy_status; the details of the last failure on this thread are in
// `last_error`.  Nothing here throws, aborts or exits.  All functions may be called from any thread.
#ifndef FOUNDRYD_HOOK_H
#define FOUNDRYD_HOOK_H

#include <stddef.h>

#include "foundryd/records.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FDY_HOOK_ABI 6

typedef enum fdy_status {
  FDY_OK = 0,
  FDY_ERROR_DRIVER = 1,       // a driver call failed: `code` is its CUresult, `call` its name
  FDY_ERROR_NCCL = 2,         // an NCCL call failed: `code` is its ncclResult_t, `call` its name
  FDY_ERROR_INVALID = 3,      // an argument is wrong
  FDY_ERROR_STATE = 4,        // called at the wrong time (layout after the first context, say)
  FDY_ERROR_DIVERGED = 5,     // the engine left the recorded allocation sequence
  FDY_ERROR_UNSUPPORTED = 6,  // a node, an allocation or a container that cannot be restored exactly
  FDY_ERROR_MEMORY = 7,       // a reservation or mapping did not come out as it must
  FDY_ERROR_NOT_FOUND = 8
} fdy_status;

typedef struct fdy_error {
  int32_t status;  // fdy_status
  int32_t code;
  char call[64];
  char message[512];  // one sentence: the cause, both values, what to do
} fdy_error;

typedef enum fdy_mode { FDY_MODE_OFF = 0, FDY_MODE_CAPTURE = 1, FDY_MODE_RESTORE = 2 } fdy_mode;

typedef struct fdy_report {
  uint32_t mode;            // fdy_mode
  uint32_t rows_installed;  // hook rows whose original was found so far
  uint32_t contexts;        // contexts created or retained in this process
  uint32_t reserved;
  uint64_t arena_base;    // 0 before the first context
  uint64_t arena_stride;  // bytes of address space for each arena
  fdy_counters engine;
  fdy_counters communication;
  // Of the calling thread, while time_driver was on: nanoseconds in driver calls, and how many.
  uint64_t driver_ns;
  uint64_t driver_calls;
} fdy_report;

// A growable array that the callee fills and the caller frees with `free_buffer`.
typedef struct fdy_buffer {
  void *data;
  uint64_t bytes;
} fdy_buffer;

// What restore must reproduce.  Set before the first context.
typedef struct fdy_layout {
  uint64_t arena_base;
  uint64_t arena_stride;
  const fdy_allocation *allocations;  // every arena's whole recorded sequence
  uint64_t allocation_count;
} fdy_layout;

// A graph as it is read and as it is built.  `strings` are not needed: functions are indices into the table that the
// caller holds (reading: hook function ids; building: the `functions` array of fdy_build).
typedef struct fdy_graph {
  const fdy_node *nodes;
  uint64_t node_count;
  const fdy_edge *edges;
  uint64_t edge_count;
  const fdy_attribute *attributes;
  uint64_t attribute_count;
  const uint8_t *params;
  uint64_t param_bytes;
  const struct fdy_graph *children;
  uint64_t child_count;
} fdy_graph;

typedef struct fdy_hook {
  uint32_t abi;    // FDY_HOOK_ABI
  uint32_t bytes;  // sizeof(fdy_hook)

  void (*last_error)(fdy_error *out);
  void (*free_buffer)(fdy_buffer *buffer);
  int (*report)(fdy_report *out);
  // Whether driver calls that go through the hook are timed; at first they are not.
  int (*time_driver)(uint32_t on);
  // Around a driver call of the calling thread that does not go through the hook, for the report's times; what does is
  // counted once.
  int (*driver_enter)(void);
  int (*driver_leave)(void);

  // --- memory ---
  // Selects the arena for allocations of the calling thread; pushes nest.
  int (*arena_push)(uint32_t arena);
  int (*arena_pop)(void);
  // RESTORE only, before the first context.
  int (*set_layout)(const fdy_layout *layout);
  // Every allocation of every arena so far, as fdy_allocation[], by arena and ordinal.  After map_held nothing is
  // added.
  int (*allocations)(fdy_buffer *out);
  // Compares the sequences of weights, kv and io with the layout, as they are now.  `out->kind` is NONE if they agree.
  // MISSING means a recorded allocation that is live in the recording; those that it had freed need not be made.  Of
  // the host arena only SIZE is reported: map_held makes what this process did not, and more disturbs nothing.
  int (*divergence)(fdy_divergence *out);
  // Maps every held range that the engine did not allocate itself; zero-filled.
  int (*map_held)(void);
  // Gives back what map_held mapped, after a restore that failed: the engine then needs the memory to capture itself.
  int (*release_held)(void);
  // Synchronous copies between host memory and any device address.
  int (*upload)(uint64_t address, const void *data, uint64_t bytes);
  int (*download)(uint64_t address, void *data, uint64_t bytes);

  // The world rank of this process, for IPC handles; RANK of the environment if this is never called.
  int (*set_rank)(uint32_t rank);
  // CAPTURE only, where no peer lives: the handle (64 bytes) of the same allocation on another rank, from this
  // process's own.  Opening it maps a zero-filled stand-in where a restored rank has that peer's memory.
  int (*ipc_peer_handle)(const void *own, uint32_t rank, void *out);
  // What is open of peers' memory, as fdy_window[], by address.
  int (*windows)(fdy_buffer *out);

  // --- modules ---
  int (*modules)(fdy_buffer *out);                        // fdy_module[]
  int (*module_image)(uint32_t module, fdy_buffer *out);  // the exact container
  // Functions used by the graphs read so far.
  int (*functions)(fdy_buffer *functions, fdy_buffer *fields, fdy_buffer *settings, fdy_buffer *strings);
  // Of the globals of a module that `names` lists or the program asked for, those that the driver knows.
  // changed_globals: only those whose bytes differ from a fresh load of the same image.
  int (*changed_globals)(uint32_t module, const char *const *names, uint64_t name_count, fdy_buffer *globals,
                         fdy_buffer *strings);
  int (*module_globals)(uint32_t module, const char *const *names, uint64_t name_count, fdy_buffer *globals,
                        fdy_buffer *strings);
  // How loading `image` differs from loading the module's own image: in these functions (attributes, parameters) or
  // globals (size, content), or in that the driver refuses it.  Text without a NUL, empty if nothing differs.
  int (*image_difference)(uint32_t module, const void *image, uint64_t bytes, const char *const *functions,
                          uint64_t function_count, const char *const *globals, uint64_t global_count,
                          fdy_buffer *difference);
  int (*load_module)(uint32_t api, const void *image, uint64_t bytes, uint32_t *module);
  int (*global_address)(uint32_t module, const char *name, uint64_t *address, uint64_t *bytes);
  // Resolves a function, applies its settings and loads it in full (cuFuncLoad).  The handle is for fdy_build.
  int (*load_function)(uint32_t module, const char *name, const fdy_setting *settings, uint64_t setting_count,
                       uint64_t *function);

  // --- graphs ---
  // Reads a captured CUgraph.  The result is one block, freed with `free_graph`.
  int (*read_graph)(void *graph, fdy_graph **out);
  void (*free_graph)(fdy_graph *graph);
  // Memory that building needs meanwhile, kept from one graph to the next.  For one build_graph at a time.
  int (*make_build_memory)(void **out);
  void (*free_build_memory)(void *memory);
  // Builds a CUgraph.  `functions[i]` is the handle for node.function == i; `comm_graphs[g]` is the small graph
  // (from comm_reissue) for node.comm_group == g.  `memory` is from make_build_memory, or NULL.  `nodes`, if not NULL,
  // becomes the CUgraphNode of each node.
  int (*build_graph)(const fdy_graph *graph, const uint64_t *functions, uint64_t function_count,
                     void *const *comm_graphs, uint64_t comm_graph_count, void *memory, void **out, fdy_buffer *nodes);
  // Gives the kernel nodes at the places `which` of an executable (CUgraphExec) of a built graph the parameters that
  // they have in `graph`; `nodes` are from build_graph.  On failure those before the one that failed are changed.
  int (*set_kernel_params)(void *executable, const fdy_graph *graph, const uint64_t *functions, uint64_t function_count,
                           void *const *nodes, uint64_t node_count, const uint32_t *which, uint64_t which_count);
  // Frees a CUgraph that build_graph or comm_reissue made.
  int (*destroy_graph)(void *graph);

  // --- communication ---
  // The world ranks of a communicator, in its own order.  NULL takes the place of one that is not made here, but not
  // while capturing.
  int (*comm_declare)(void *communicator, const uint32_t *ranks, uint64_t count);
  int (*communicators)(fdy_buffer *communicators, fdy_buffer *ranks);  // fdy_communicator[], uint32_t[]
  // Collective calls recorded under stream capture, in order, as fdy_comm_op[].
  int (*comm_ops)(fdy_buffer *out);
  // Issues the calls of one group again under capture on a private stream.  `ops[i].communicator` is the slot.
  int (*comm_reissue)(const fdy_comm_op *ops, uint64_t count, void **graph);
} fdy_hook;

// NULL if `abi` is not supported.
typedef const fdy_hook *(*fdy_hook_api_fn)(uint32_t abi);
const fdy_hook *fdy_hook_api(uint32_t abi);

#ifdef __cplusplus
}
#endif

#endif  // FOUNDRYD_HOOK_H
