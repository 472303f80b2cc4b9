// SPDX-License-Identifier: Apache-2.0
//
// What crosses the C ABI of libnccl.so.2, versions 2.27 to 2.30, as far as the stubs look at it.
#ifndef NCCLSTUB_ABI_H
#define NCCLSTUB_ABI_H

#include <climits>
#include <cstddef>
#include <cstdint>

struct CUstream_st;
struct ncclComm;
struct ncclWindow;

using ncclComm_t = ncclComm *;
using ncclStream_t = CUstream_st *;
using ncclWindow_t = ncclWindow *;  // since 2.28 the library's own is a device address

enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,  // since 2.30
};

enum ncclDataType_t : int {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12,
};

// Values from ncclNumOps on are operators that ncclRedOpCreatePreMulSum made.
enum ncclRedOp_t : int { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps = 5 };

enum ncclScalarResidence_t : int { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };

// Passed by value: 128 bytes on the stack.
struct ncclUniqueId {
  char internal[128];
};
static_assert(sizeof(ncclUniqueId) == 128);

inline constexpr unsigned kConfigMagic = 0xcafebeef;
inline constexpr unsigned kSimInfoMagic = 0x74685283;
inline constexpr int kUndefined = INT_MIN;
inline constexpr int kNoColor = -1;

// ncclConfig_t as of 2.30.  A caller that was built with an older header passes a shorter one: `size` says so, and
// fields beyond it are read as undefined.
struct ncclConfig_t {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cga_cluster_size;
  int min_ctas;
  int max_ctas;
  const char *net_name;
  int split_share;
  int traffic_class;
  const char *comm_name;
  int collnet_enable;
  int cta_policy;
  int shrink_share;
  int nvls_ctas;  // 2.27 ends here
  int channels_per_net_peer;
  int nvlink_centric_sched;  // 2.28
  int graph_usage_mode;      // 0: no graphs, 1: one at a time, 2: graphs and eager calls mixed
  int num_rma_ctx;           // 2.29
  int max_p2p_peers;
  int graph_stream_ordering;  // 2.30
};
static_assert(offsetof(ncclConfig_t, channels_per_net_peer) == 72);
static_assert(offsetof(ncclConfig_t, graph_usage_mode) == 80);
static_assert(sizeof(ncclConfig_t) == 96);

struct ncclSimInfo_t {
  size_t size;
  unsigned magic;
  unsigned version;
  float estimated_time;
};
static_assert(sizeof(ncclSimInfo_t) == 24);

// Returned in registers by the ncclTeam functions of the device interface, which the stubs refuse.
struct ncclTeam_t {
  int size, rank, stride;
};

#endif  // NCCLSTUB_ABI_H
