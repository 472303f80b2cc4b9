// SPDX-License-Identifier: Apache-2.0
//
// Parameters of nodes as plain bytes: every byte that the driver leaves undefined is zero, and what cannot mean the
// same in another process is refused.
#ifndef FOUNDRYD_HOOK_GRAPHS_NODE_PARAMS_H
#define FOUNDRYD_HOOK_GRAPHS_NODE_PARAMS_H

#include <cstdint>
#include <vector>

#include "foundryd/records.h"
#include "modules/functions.h"
#include "support/cuda.h"

namespace foundryd::graphs {

struct ParamBytes {
  fdy_param_kind kind = FDY_PARAM_NONE;
  std::vector<uint8_t> bytes;
};

ParamBytes kernel_params(const CUDA_KERNEL_NODE_PARAMS_v2 &params, const modules::UsedFunction &function);
ParamBytes memcpy_params(const CUDA_MEMCPY3D_v2 &params);
ParamBytes memset_params(const CUDA_MEMSET_NODE_PARAMS_v1 &params);

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_NODE_PARAMS_H
