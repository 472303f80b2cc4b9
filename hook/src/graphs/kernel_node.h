// SPDX-License-Identifier: Apache-2.0
//
// Kernel nodes from records to what the driver takes.
#ifndef FOUNDRYD_HOOK_GRAPHS_KERNEL_NODE_H
#define FOUNDRYD_HOOK_GRAPHS_KERNEL_NODE_H

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "foundryd/hook.h"
#include "modules/functions.h"
#include "support/cuda.h"

namespace foundryd::graphs {

// Makes one node after another; the memory for it is kept.
class KernelNodes {
 public:
  explicit KernelNodes(std::span<const uint64_t> functions) : functions_(functions), layouts_(functions.size()) {}
  KernelNodes(const KernelNodes &) = delete;
  KernelNodes &operator=(const KernelNodes &) = delete;

  // The parameters of a validated node of `graph`; they point into the graph and into this, until the next call.
  // Throws Error if the function takes others.
  const CUDA_KERNEL_NODE_PARAMS_v2 &params_of(const fdy_graph &graph, const fdy_node &node);

 private:
  const modules::ParamLayout &layout_of(uint32_t number);

  std::span<const uint64_t> functions_;
  std::vector<std::shared_ptr<const modules::ParamLayout>> layouts_;  // by function, once it was needed
  CUDA_KERNEL_NODE_PARAMS_v2 params_{};
  std::vector<void *> list_;
  std::vector<uint8_t> padded_;
  size_t size_ = 0;
  void *extra_[5] = {};
};

inline std::span<const fdy_attribute> attributes_of(const fdy_graph &graph, const fdy_node &node) {
  return {graph.attributes + node.attribute_first, node.attribute_count};
}

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_KERNEL_NODE_H
