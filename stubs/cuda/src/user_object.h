// SPDX-License-Identifier: Apache-2.0
#ifndef SOFTCUDA_USER_OBJECT_H
#define SOFTCUDA_USER_OBJECT_H

#include "process.h"

namespace softcuda {

struct UserObject {
  void *data = nullptr;
  CUhostFn destroy = nullptr;
  uint64_t references = 0;
  uint64_t held_by_program = 0;
};

}  // namespace softcuda

#endif  // SOFTCUDA_USER_OBJECT_H
