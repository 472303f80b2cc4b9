// SPDX-License-Identifier: Apache-2.0
//
// The functions that graph nodes use, in the order in which they were first read.
#ifndef FOUNDRYD_HOOK_MODULES_FUNCTIONS_H
#define FOUNDRYD_HOOK_MODULES_FUNCTIONS_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "foundryd/hook.h"
#include "support/cuda.h"

namespace foundryd::modules {

struct ParamLayout {
  std::vector<fdy_field> fields;
  uint32_t bytes = 0;  // size of the packed parameter block
};

// From cuKernelGetParamInfo if there is a kernel, else from cuFuncGetParamInfo.
ParamLayout param_layout(CUfunction function, CUkernel kernel);

// Asks the driver for the layout of a function that was just loaded, and keeps it until some module is unloaded.
void keep_layout(CUfunction function);

// The layout that was kept, or else what the driver says now.
std::shared_ptr<const ParamLayout> known_layout(CUfunction function);

struct UsedFunction {
  uint32_t module;
  std::string name;
  ParamLayout params;
  uint32_t shared_bytes = 0;  // the most that a node of it has
};

// The function of a node, looked up without a place in the table.  Throws Error if its module cannot be archived.
UsedFunction inspect_function(CUfunction function, CUkernel kernel);

// The place of a function in the table that fdy_hook.functions answers; added if it is new.  A node of it has so much
// dynamic shared memory.
uint32_t use_function(const UsedFunction &function, uint32_t shared_bytes);

void fill_functions(fdy_buffer *functions, fdy_buffer *fields, fdy_buffer *settings, fdy_buffer *strings);

}  // namespace foundryd::modules

#endif  // FOUNDRYD_HOOK_MODULES_FUNCTIONS_H
