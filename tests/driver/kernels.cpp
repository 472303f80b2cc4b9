// SPDX-License-Identifier: Apache-2.0
//
// Kernels with which the tests hold work in flight, and make it fail.
#include <atomic>
#include <ctime>
#include <stdexcept>

#include "softcuda/kernel.h"

// Runs until the host writes something else than 0.
SOFTCUDA_KERNEL(gate, const unsigned *open) {
  if (blockIdx.x != 0) return;
  std::atomic_ref<unsigned> flag(*const_cast<unsigned *>(open));
  while (flag.load() == 0) {
    const timespec pause{0, 1000000};
    nanosleep(&pause, nullptr);
  }
}

SOFTCUDA_KERNEL(increment, unsigned *x) {
  if (blockIdx.x == 0) std::atomic_ref<unsigned>(*x).fetch_add(1);
}

SOFTCUDA_KERNEL(fail, unsigned code) {
  if (code != 0) throw std::runtime_error("the kernel was told to fail");
}

SOFTCUDA_KERNEL(never_loaded, unsigned *x) {
  if (blockIdx.x == 0) *x = 9;
}

// What a block sees of its launch and of its shared memory.
SOFTCUDA_KERNEL(look, unsigned *out) {
  const softcuda::Launch &launch = softcuda::launch();
  const unsigned at = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[4 * at] = launch.block.x * launch.block.y * launch.block.z;
  out[4 * at + 1] = launch.shared_bytes;
  auto *shared = static_cast<unsigned *>(launch.shared);
  out[4 * at + 2] = shared == nullptr ? 0 : shared[0];
  if (shared != nullptr) shared[0] = 0;
  out[4 * at + 3] = threadIdx.x + blockDim.x;
}

SOFTCUDA_IMAGE()
