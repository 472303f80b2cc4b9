// SPDX-License-Identifier: Apache-2.0
//
// Inside the driver a call that cannot go on throws the CUresult that it answers; `call` in process.h is where it
// ends.  Nothing is thrown across the driver's border.
#ifndef SOFTCUDA_FAILURE_H
#define SOFTCUDA_FAILURE_H

#include "api.h"

namespace softcuda {

struct Failure {
  CUresult code;
};

inline void require(bool condition, CUresult code = CUDA_ERROR_INVALID_VALUE) {
  if (!condition) throw Failure{code};
}

}  // namespace softcuda

#endif  // SOFTCUDA_FAILURE_H
