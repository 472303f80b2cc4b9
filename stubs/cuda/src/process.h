// SPDX-License-Identifier: Apache-2.0
//
// The state of the driver in one process, and the frame around every call.
#ifndef SOFTCUDA_PROCESS_H
#define SOFTCUDA_PROCESS_H

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "failure.h"
#include "handles.h"
#include "queue.h"
#include "softcuda/counters.h"

namespace softcuda {

struct Capture;
struct Context;
struct Event;
struct Function;
struct Graph;
struct GraphExec;
struct Kernel;
struct Library;
struct MemPool;
struct Module;
struct Node;
struct Stream;
struct UserObject;

// What the environment says, read once at cuInit.
struct Settings {
  int devices = 1;                       // SOFTCUDA_DEVICES
  uint64_t memory = uint64_t{16} << 30;  // SOFTCUDA_MEMORY, bytes on each device
  int poison = 0xcb;                     // SOFTCUDA_POISON: a byte, "random" (one byte a process), or "off" (-1)
  bool poison_whole = false;             // SOFTCUDA_POISON_WHOLE=1: see heap.h
  bool eager_loading = false;            // CUDA_MODULE_LOADING=EAGER
};

struct Counters {
  std::atomic<uint64_t> launches{0}, captures{0}, graph_launches{0}, instantiations{0}, module_loads{0}, allocations{0};
};

struct Device {
  int ordinal = 0;
  std::shared_ptr<Context> primary;  // made once, active while retained
  unsigned primary_flags = 0;
  unsigned primary_references = 0;
  uint64_t memory_used = 0;
  std::shared_ptr<MemPool> default_pool;
  std::shared_ptr<MemPool> current_pool;
};

// One lock guards all tables.  It is never held while anything waits for a queue.
struct Process {
  std::mutex mutex;
  Settings settings;
  std::vector<Device> devices;

  Handles<Context, CUcontext> contexts;
  Handles<Stream, CUstream> streams;
  Handles<Event, CUevent> events;
  Handles<Module, CUmodule> modules;
  Handles<Library, CUlibrary> libraries;
  Handles<Function, CUfunction> functions;
  Handles<Kernel, CUkernel> kernels;
  Handles<Graph, CUgraph> graphs;
  Handles<Node, CUgraphNode> nodes;
  Handles<GraphExec, CUgraphExec> execs;
  Handles<UserObject, CUuserObject> user_objects;
  Handles<MemPool, CUmemoryPool> pools;
  std::vector<std::shared_ptr<Capture>> captures;

  uint64_t next_id = 1;  // of streams, contexts, captures, buffers, nodes: unique in the process
  std::array<Counters, SOFTCUDA_OWNER_COUNT> counters;
  std::shared_ptr<Queue> reaper;  // runs destructors of user objects
};

// Never destroyed: worker threads outlive static destructors.
Process &process();

using Lock = std::unique_lock<std::mutex>;
inline Lock lock_process() {
  return Lock(process().mutex);
}

// What belongs to a thread.
struct Thread {
  std::vector<std::weak_ptr<Context>> contexts;  // the stack; the last one is current
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  uint32_t owner = SOFTCUDA_OWNER_ENGINE;
  bool per_thread_default_stream = false;                   // while a _ptds or _ptsz entry runs
  std::map<uint64_t, std::shared_ptr<Stream>> own_streams;  // CU_STREAM_PER_THREAD by context id
};
Thread &this_thread();

inline Counters &counters() {
  return process().counters[this_thread().owner];
}

// Sets the process up.  In a child forked from an initialised process it fails, as every call does there.
CUresult initialise(unsigned flags);
CUresult initialised();

Device &device_at(CUdevice ordinal);

// Counts the page faults of a call while it lives, if they were to be counted when it began; one inside another counts
// once.
class CountedFaults {
 public:
  static inline constinit std::atomic<bool> on{false};

  CountedFaults() noexcept : counted_(on.load(std::memory_order_relaxed)) {
    if (counted_) enter();
  }
  ~CountedFaults() {
    if (counted_) leave();
  }
  CountedFaults(const CountedFaults &) = delete;
  CountedFaults &operator=(const CountedFaults &) = delete;

 private:
  static void enter() noexcept;
  static void leave() noexcept;

  const bool counted_;
};

// The frame around every call: refuses before cuInit and in forked children, and turns failures into results.
template <class Body>
CUresult call(Body body) noexcept {
  const CountedFaults counted;
  if (const CUresult state = initialised(); state != CUDA_SUCCESS) return state;
  try {
    body();
    return CUDA_SUCCESS;
  } catch (const Failure &failure) {
    return failure.code;
  } catch (const std::bad_alloc &) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (...) {
    return CUDA_ERROR_UNKNOWN;
  }
}

// The same with the process locked.
template <class Body>
CUresult locked_call(Body body) noexcept {
  return call([&] {
    const Lock lock = lock_process();
    body();
  });
}

}  // namespace softcuda

#endif  // SOFTCUDA_PROCESS_H
