// SPDX-License-Identifier: Apache-2.0
//
// A communicator as both libraries see it, and what each library makes of it.
#ifndef NCCLSTUB_COMMUNICATOR_H
#define NCCLSTUB_COMMUNICATOR_H

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"
#include "ncclstub/abi.h"
#include "ncclstub/op.h"

namespace ncclstub {

// One call, as it waits in a group.
struct Task {
  OpKind kind;
  ncclDataType_t type;
  ncclRedOp_t op = ncclSum;
  int peer = -1;  // root, or the other side of send and recv
  const void *send = nullptr;
  void *recv = nullptr;
  size_t count = 0;
};

// The capture that a stream is in.  `id` is 0 outside of one.
struct Capture {
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
  std::vector<CUgraphNode> frontier;  // what the stream's next node will depend on
};

ncclResult_t read_capture(CUstream stream, Capture *out);
// Makes `nodes` what the stream's next node will depend on.
ncclResult_t set_frontier(CUstream stream, std::vector<CUgraphNode> nodes);

// The user operators of ncclRedOpCreatePreMulSum.
struct PreMul {
  ncclDataType_t type;
  uint64_t scalar;        // its bytes, or its device address
  bool scalar_on_device;  // read when the collective runs
};

// What the caller asked for with ncclConfig_t, defaults filled in.
struct Config {
  bool graph_mixing = true;
};

ncclResult_t parse_config(const ncclConfig_t *config, Config *out);

}  // namespace ncclstub

// The type behind ncclComm_t.  Members without a comment are constant after construction.
struct ncclComm {
  int size = 0;
  int rank = 0;
  int device = 0;
  CUcontext context = nullptr;
  ncclstub::Config config;

  std::atomic<bool> finalized{false};
  std::atomic<bool> revoked{false};

  ncclComm() = default;
  ncclComm(const ncclComm &) = delete;
  ncclComm &operator=(const ncclComm &) = delete;
  virtual ~ncclComm() = default;

  // Enqueues the tasks of one group, as one launch.  The context is current; `capture` is that of `stream`.
  virtual ncclResult_t launch(const std::vector<ncclstub::Task> &tasks, CUstream stream,
                              const ncclstub::Capture &capture) = 0;
  // Collective over this communicator; `*child` stays empty for a rank without colour.
  virtual ncclResult_t split(int color, int key, const ncclstub::Config &child_config,
                             std::unique_ptr<ncclComm> *child) = 0;
  // Collective over the ranks that stay.  `excluded` is sorted and without duplicates.
  virtual ncclResult_t shrink(const std::vector<int> &excluded, const ncclstub::Config &child_config,
                              std::unique_ptr<ncclComm> *child) = 0;
  // Waits for everything enqueued.
  virtual ncclResult_t flush() = 0;
  // Makes kernels in flight, and later ones, return at once.
  virtual void stop() = 0;
  virtual ncclResult_t async_error() = 0;
  // The sentence of the asynchronous error, "" without one.
  virtual const char *async_message() = 0;
  // The caller tells (or checks) what the communicator's true size and rank are.
  virtual ncclResult_t declare(int true_size, int true_rank) = 0;

  ncclstub::PreMul premul(ncclRedOp_t op);
  bool has_op(ncclRedOp_t op);
  ncclRedOp_t add_op(const ncclstub::PreMul &value);
  bool remove_op(ncclRedOp_t op);

 private:
  std::mutex ops_mutex_;
  std::map<int, ncclstub::PreMul> ops_;
  int next_op_ = ncclNumOps;
};

namespace ncclstub {

// --- provided by each of the two libraries ---

// Whether init must reach other processes, so that several in one group need a thread each.
extern const bool kInitBlocks;
// Fills what `out` has not: the caller has set size, rank, device, context and config in `shape`.
struct Shape {
  int size, rank, device;
  CUcontext context;
  Config config;
};
ncclResult_t make_communicator(const Shape &shape, const ncclUniqueId &id, std::unique_ptr<ncclComm> *out);
// Whether the library can reduce this type.
bool can_reduce(ncclDataType_t type);

// --- handles ---

// Owns the communicator from here on.
ncclComm_t publish(std::unique_ptr<ncclComm> comm);
// Takes it back; empty if the handle is not a live communicator's.
std::unique_ptr<ncclComm> take(ncclComm_t handle);
bool is_live(ncclComm_t handle);
// Fails if it is not.
ncclResult_t check_handle(ncclComm_t handle);

ncclResult_t make_unique_id(ncclUniqueId *out);

}  // namespace ncclstub

#endif  // NCCLSTUB_COMMUNICATOR_H
