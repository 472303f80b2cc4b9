// SPDX-License-Identifier: Apache-2.0
//
// Every plain struct that crosses a border: hook to Python, Python to file, file to hook.  The bindings expose
// each of them as a NumPy dtype, so an offset is written here and nowhere else.  All of them are little-endian,
// naturally aligned and free of pointers.  A changed struct is a new archive format.
#ifndef FOUNDRYD_RECORDS_H
#define FOUNDRYD_RECORDS_H

#include <stdint.h>

#define FDY_NONE 0xffffffffu  // "no such index" in every index field

// ---- memory -------------------------------------------------------------------------------------------------

// Each arena is a deterministic sequence of its own.  HOST is pinned host memory at a fixed address.
typedef enum fdy_arena {
  FDY_ARENA_DEFAULT = 0,
  FDY_ARENA_WEIGHTS = 1,
  FDY_ARENA_KV = 2,
  FDY_ARENA_IO = 3,
  FDY_ARENA_GRAPH = 4,
  FDY_ARENA_HOST = 5,
  FDY_ARENA_COUNT = 6
} fdy_arena;

// Reservations that an engine makes itself (cuMemAddressReserve) lie behind the arenas and 64 strides that are left for
// windows of peers: those of arena a, which is of device memory, in FDY_RESERVATION_STRIDES strides from
// base + (FDY_RESERVATION_FIRST + a * FDY_RESERVATION_STRIDES) * stride.  What is mapped there is an allocation of that
// arena.
#define FDY_RESERVATION_FIRST 70u
#define FDY_RESERVATION_STRIDES 8u

// One allocation, in the order of the arena's own sequence.
typedef struct fdy_allocation {
  uint64_t address;
  uint64_t bytes;    // as requested
  uint32_t arena;    // fdy_arena
  uint32_t ordinal;  // place in the arena's sequence, from 0
  uint32_t live;     // 1 while not freed
  uint32_t reserved;
} fdy_allocation;

typedef struct fdy_range {
  uint64_t address;
  uint64_t bytes;
} fdy_range;

typedef enum fdy_divergence_kind {
  FDY_DIVERGENCE_NONE = 0,
  FDY_DIVERGENCE_SIZE = 1,      // the recording has another size at this ordinal
  FDY_DIVERGENCE_EXTRA = 2,     // the recording's sequence ends before this ordinal
  FDY_DIVERGENCE_MISSING = 3,   // the recording goes on, the process stopped here
  FDY_DIVERGENCE_LIFETIME = 4,  // freed here and live there, or the other way round
  FDY_DIVERGENCE_ADDRESS = 5    // mapped by the engine itself, and the recording has it at another place
} fdy_divergence_kind;

// The first place where this process left the recorded sequence of an arena.
typedef struct fdy_divergence {
  uint32_t kind;  // fdy_divergence_kind
  uint32_t arena;
  uint32_t ordinal;
  uint32_t reserved;
  uint64_t expected_bytes;
  uint64_t actual_bytes;
} fdy_divergence;

// An allocation of rank `rank` that was opened through an IPC handle, where window `rank` shows it.
typedef struct fdy_window {
  uint64_t address;
  uint64_t bytes;   // of the allocation, as requested
  uint64_t origin;  // its address on that rank
  uint32_t rank;
  uint32_t reserved;
} fdy_window;

// ---- modules ------------------------------------------------------------------------------------------------

typedef enum fdy_module_api {
  FDY_MODULE_LOAD_DATA = 0,  // cuModuleLoadData, cuModuleLoadDataEx, cuModuleLoadFatBinary, cuModuleLoad
  FDY_LIBRARY_LOAD_DATA = 1  // cuLibraryLoadData, cuLibraryLoadFromFile
} fdy_module_api;

// One module *instance*: the same image loaded twice is two instances with globals of their own.
typedef struct fdy_module {
  uint32_t id;           // position in load order, from 0
  uint32_t api;          // fdy_module_api
  uint64_t image_bytes;  // exact container size
  uint64_t handle;       // CUmodule or CUlibrary of this process
  uint32_t live;
  uint32_t communication;  // 1 if loaded by a communication library: bound to the live library, never archived
} fdy_module;

// A function that some graph node uses.
typedef struct fdy_function {
  uint32_t module;  // fdy_module.id
  uint32_t name;    // offset of the NUL-terminated name in the string block that comes with the table
  uint32_t param_count;
  uint32_t param_bytes;    // size of the packed parameter block
  uint32_t param_first;    // first fdy_field of this function in the field table
  uint32_t setting_first;  // first fdy_setting in the setting table
  uint32_t setting_count;
  uint32_t reserved;
} fdy_function;

// One kernel parameter, from cuFuncGetParamInfo.
typedef struct fdy_field {
  uint32_t offset;
  uint32_t bytes;
} fdy_field;

// The cache configuration of a function (cuFuncSetCacheConfig) among its attributes.
#define FDY_SETTING_CACHE_CONFIG (-1)

// A function attribute as the program last set it (cuFuncSetAttribute, cuKernelSetAttribute), but that what only allows
// launches allows all nodes that were read.
typedef struct fdy_setting {
  int32_t attribute;  // CUfunction_attribute, or FDY_SETTING_CACHE_CONFIG
  int32_t value;
} fdy_setting;

// A writable global of a module.
typedef struct fdy_global {
  uint32_t module;
  uint32_t name;  // offset in the string block
  uint64_t address;
  uint64_t bytes;
} fdy_global;

// ---- graphs -------------------------------------------------------------------------------------------------

typedef enum fdy_node_type {
  FDY_NODE_KERNEL = 0,
  FDY_NODE_MEMCPY = 1,  // parameters: CUDA_MEMCPY3D
  FDY_NODE_MEMSET = 2,  // parameters: CUDA_MEMSET_NODE_PARAMS
  FDY_NODE_EMPTY = 3,
  FDY_NODE_CHILD = 4,
  FDY_NODE_COMM = 5  // placeholder of one (group, communicator), replaced at restore by re-issue
} fdy_node_type;

typedef enum fdy_param_kind {
  FDY_PARAM_NONE = 0,
  FDY_PARAM_LIST = 1,   // kernelParams
  FDY_PARAM_EXTRA = 2,  // CU_LAUNCH_PARAM_BUFFER_POINTER
  FDY_PARAM_STRUCT = 3  // a driver struct, for memcpy and memset
} fdy_param_kind;

// 64 bytes.  The part that may differ between members of a template is `function`, `grid`, `block`,
// `shared_bytes`, `comm_group` and the parameter bytes; everything else belongs to the template's key.
typedef struct fdy_node {
  uint32_t type;      // fdy_node_type
  uint32_t function;  // index in the function table, FDY_NONE if not a kernel
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  uint32_t param_kind;    // fdy_param_kind
  uint32_t param_offset;  // in the graph's parameter block
  uint32_t param_bytes;
  uint32_t attribute_first;
  uint32_t attribute_count;
  uint32_t comm_group;  // fdy_comm_group.id, FDY_NONE if not a placeholder
  uint32_t child;       // index in the graph's children, FDY_NONE
} fdy_node;

// An edge with its data, as cuGraphGetEdges_v2 gives it.
typedef struct fdy_edge {
  uint32_t from;
  uint32_t to;
  uint8_t from_port;
  uint8_t to_port;
  uint8_t type;  // CUgraphDependencyType
  uint8_t reserved[5];
} fdy_edge;

// A node attribute: the id and the raw 64 bytes of its CUlaunchAttributeValue.
typedef struct fdy_attribute {
  uint32_t id;  // CUlaunchAttributeID
  uint32_t reserved;
  uint8_t value[64];
} fdy_attribute;

// ---- communication ------------------------------------------------------------------------------------------

typedef enum fdy_comm_op_kind {
  FDY_COMM_ALL_REDUCE = 0,
  FDY_COMM_ALL_GATHER = 1,
  FDY_COMM_REDUCE_SCATTER = 2,
  FDY_COMM_BROADCAST = 3,
  FDY_COMM_REDUCE = 4,
  FDY_COMM_ALL_TO_ALL = 5,
  FDY_COMM_GATHER = 6,
  FDY_COMM_SCATTER = 7,
  FDY_COMM_SEND = 8,
  FDY_COMM_RECV = 9
} fdy_comm_op_kind;

// A communicator, in creation order.  `member_first` and `member_count` point into a table of world ranks that
// the engine declared; a count of 0 means that it declared none.
typedef struct fdy_communicator {
  uint32_t slot;
  uint32_t size;
  uint32_t rank;  // this process's rank in it
  uint32_t live;
  uint64_t handle;  // ncclComm_t of this process
  uint32_t member_first;
  uint32_t member_count;
  uint32_t declared;  // its place in the order of declarations, FDY_NONE if nobody declared it
  uint32_t reserved;
} fdy_communicator;

// One recorded call.  Calls with the same `group` and `communicator` are one launch and one placeholder.
typedef struct fdy_comm_op {
  uint64_t send;
  uint64_t recv;
  uint64_t count;         // in elements, as the call gave it
  uint32_t kind;          // fdy_comm_op_kind
  uint32_t datatype;      // ncclDataType_t
  uint32_t reduction;     // ncclRedOp_t, FDY_NONE where the call has none
  uint32_t peer;          // root or peer, FDY_NONE where the call has none
  uint32_t communicator;  // slot
  uint32_t group;         // id of the placeholder
} fdy_comm_op;

// ---- counters -----------------------------------------------------------------------------------------------

// Calls that reached the driver since the process started, by who made them.
typedef struct fdy_counters {
  uint64_t launches;
  uint64_t captures;
  uint64_t graph_launches;
  uint64_t instantiations;
  uint64_t module_loads;
  uint64_t allocations;
} fdy_counters;

#endif  // FOUNDRYD_RECORDS_H
