// SPDX-License-Identifier: Apache-2.0
#ifndef SOFTCUDA_CONTEXT_H
#define SOFTCUDA_CONTEXT_H

#include <condition_variable>
#include <memory>
#include <set>
#include <vector>

#include "process.h"

namespace softcuda {

struct Context {
  CUdevice device = 0;
  uint64_t id = 0;
  unsigned flags = 0;
  unsigned api_version = CUDA_VERSION;
  bool primary = false;
  bool active = true;  // false for a primary context that nobody retains, and after destruction
  std::shared_ptr<Fault> fault = std::make_shared<Fault>(CUDA_SUCCESS);

  std::shared_ptr<Stream> legacy;             // the null stream
  std::set<std::shared_ptr<Stream>> streams;  // all others
  std::set<std::shared_ptr<Module>> modules;
  std::vector<std::shared_ptr<Queue>> lanes;  // idle helpers of graph launches
  std::set<const Context *> peers;            // enabled peer access
  CUfunc_cache cache = CU_FUNC_CACHE_PREFER_NONE;
  unsigned loading = 0;            // threads that bring a module into the context ...
  std::condition_variable loaded;  // ... and who waits for them, with the process's lock
  size_t limits[CU_LIMIT_MAX] = {1024, 8u << 20, 8u << 20, 2, 2048, 64, 0, 0, 0, 0};
};

// The calling thread's context.  Fails without one, on a destroyed one, and on one whose work has failed.
std::shared_ptr<Context> current_context();
// The same without looking at failed work; null without one.
std::shared_ptr<Context> current_context_or_null();

// Makes the streams of a new context.
void open_context(const std::shared_ptr<Context> &context);

// Points up to which all work of the context is submitted now; wait for them without the lock.
std::vector<Mark> pending_work(const Context &context);

}  // namespace softcuda

#endif  // SOFTCUDA_CONTEXT_H
