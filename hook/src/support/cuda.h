// SPDX-License-Identifier: Apache-2.0
//
// cuda.h without its renaming macros: every name below is exactly the symbol that the driver exports, so that a row,
// an override and a call can never mean different versions of a function.
#ifndef FOUNDRYD_HOOK_SUPPORT_CUDA_H
#define FOUNDRYD_HOOK_SUPPORT_CUDA_H

#define __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL_ODR
#include <cuda.h>

#endif  // FOUNDRYD_HOOK_SUPPORT_CUDA_H
