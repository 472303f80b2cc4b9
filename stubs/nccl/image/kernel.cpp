// SPDX-License-Identifier: Apache-2.0
//
// The soft library's one kernel.  What it knows of order lies in the communicator, not in its parameter, so a node
// may be replayed from any graph, any number of times.
#include "softcuda/kernel.h"

#include "ncclstub/soft_wait.h"
#include "transport.h"

namespace {

using namespace ncclstub::soft;

void run(const KernelArgs &args) {
  CommState &state = *args.state;
  const std::lock_guard running(state.running);
  if (state.destroyed) {
    set_error(state, ncclInvalidUsage,
              "a graph launches a collective of a communicator that was destroyed: destroy graphs first");
  }
  if (state.stopped) return;
  if (state.error != ncclSuccess) throw Failed{};
  const Op *ops = args.ops != nullptr ? args.ops : args.inlined;
  for (uint32_t i = 0; i < args.collective_count; ++i) run_collective(state, ops[i]);
  const uint32_t others = args.op_count - args.collective_count;
  if (others > 0) run_point_to_point(state, ops + args.collective_count, others);
}

// Tells the library that the kernel is through with its operations, however it ended.
struct Finish {
  std::atomic<bool> *finished;
  ~Finish() {
    if (finished != nullptr) finished->store(true, std::memory_order_release);
  }
};

}  // namespace

SOFTCUDA_KERNEL(softncclDevKernel, ncclstub::soft::KernelArgs args) {
  const Finish finish{args.finished};
  try {
    run(args);
  } catch (const Stopped &) {
  }
}

SOFTCUDA_IMAGE()
