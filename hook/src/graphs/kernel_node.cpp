// SPDX-License-Identifier: Apache-2.0
#include "graphs/kernel_node.h"

#include <algorithm>

#include "graphs/attributes.h"
#include "support/error.h"

namespace foundryd::graphs {

const CUDA_KERNEL_NODE_PARAMS_v2 &KernelNodes::params_of(const fdy_graph &graph, const fdy_node &node) {
  const modules::ParamLayout &layout = layout_of(node.function);
  params_ = {};
  params_.func = reinterpret_cast<CUfunction>(static_cast<uintptr_t>(functions_[node.function]));
  params_.gridDimX = node.grid[0];
  params_.gridDimY = node.grid[1];
  params_.gridDimZ = node.grid[2];
  params_.blockDimX = node.block[0];
  params_.blockDimY = node.block[1];
  params_.blockDimZ = node.block[2];
  params_.sharedMemBytes = node.shared_bytes;

  const bool fits = node.param_kind == FDY_PARAM_LIST    ? node.param_bytes == layout.bytes
                    : node.param_kind == FDY_PARAM_EXTRA ? node.param_bytes <= layout.bytes
                                                         : layout.fields.empty() && node.param_bytes == 0;
  if (!fits)
    throw Error(FDY_ERROR_INVALID,
                "a node has %u bytes of parameters of kind %u for function %u, which takes %u: the "
                "archive's function is another one",
                node.param_bytes, node.param_kind, node.function, layout.bytes);

  // The driver copies parameters from where they lie.  It only reads them, though its types do not say so.
  auto *block = const_cast<uint8_t *>(graph.params + node.param_offset);
  size_ = node.param_bytes;
  // It refuses a cooperative kernel with `extra`; a list must point into a whole block.
  if (node.param_kind == FDY_PARAM_LIST ||
      (node.param_kind == FDY_PARAM_EXTRA && is_cooperative(attributes_of(graph, node)))) {
    if (size_ < layout.bytes) {
      padded_.assign(layout.bytes, 0);
      std::copy(block, block + size_, padded_.begin());
      block = padded_.data();
    }
    list_.clear();
    for (const fdy_field &field : layout.fields) list_.push_back(block + field.offset);
    params_.kernelParams = list_.data();
  } else if (node.param_kind == FDY_PARAM_EXTRA) {
    void *const extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, block, CU_LAUNCH_PARAM_BUFFER_SIZE, &size_,
                           CU_LAUNCH_PARAM_END};
    std::copy(std::begin(extra), std::end(extra), extra_);
    params_.extra = extra_;
  }
  return params_;
}

const modules::ParamLayout &KernelNodes::layout_of(uint32_t number) {
  std::shared_ptr<const modules::ParamLayout> &layout = layouts_[number];
  if (!layout) layout = modules::known_layout(reinterpret_cast<CUfunction>(static_cast<uintptr_t>(functions_[number])));
  return *layout;
}

}  // namespace foundryd::graphs
