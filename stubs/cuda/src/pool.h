// SPDX-License-Identifier: Apache-2.0
#ifndef SOFTCUDA_POOL_H
#define SOFTCUDA_POOL_H

#include <map>
#include <memory>

#include "process.h"

namespace softcuda {

struct MemPool {
  CUdevice device = 0;
  CUmemPoolProps properties{};
  uint64_t release_threshold = 0;
  int reuse_event = 1;
  int reuse_opportunistic = 1;
  int reuse_internal = 1;
  uint64_t used = 0;
  uint64_t used_high = 0;
};

std::shared_ptr<MemPool> default_pool(Device &device);

}  // namespace softcuda

#endif  // SOFTCUDA_POOL_H
