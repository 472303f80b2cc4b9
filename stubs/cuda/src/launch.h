// SPDX-License-Identifier: Apache-2.0
#ifndef SOFTCUDA_LAUNCH_H
#define SOFTCUDA_LAUNCH_H

#include <span>

#include "graph.h"
#include "module.h"
#include "stream.h"

namespace softcuda {

// What a launch asks for, whichever call it came from.
struct LaunchRequest {
  std::array<unsigned, 3> grid{};
  std::array<unsigned, 3> block{};
  unsigned shared_bytes = 0;
  void **params = nullptr;
  void **extra = nullptr;
};

// Checks shape and arguments against the function and copies the arguments.
KernelWork kernel_work(const std::shared_ptr<Function> &function, const LaunchRequest &request);

// Checks that attributes fit a launch: cluster shape, cooperative size.
void check_attributes(const KernelWork &work, const Attributes &attributes);

// The cluster shape that attributes ask for; a cluster is one block where they ask for none.
std::array<unsigned, 3> cluster_shape(const Attributes &attributes);

// Runs all blocks, one after another.
void run_kernel(const KernelWork &work);

// Node attributes, one by one: a value's unused bytes stay as the caller left them.
bool is_node_attribute(CUlaunchAttributeID id);
void check_node_attribute(CUlaunchAttributeID id, const CUlaunchAttributeValue &value);
// Checks that they fit a node that a program makes or changes.  It takes no `extra` if it is cooperative, though what a
// capture makes may be both.
void check_node_attributes(const KernelWork &work, const Attributes &attributes);
void write_node_attribute(CUlaunchAttributeValue *out, CUlaunchAttributeID id, const Attributes &attributes);
// The value with everything zero that the attribute does not use.
CUlaunchAttributeValue clean_attribute(CUlaunchAttributeID id, const CUlaunchAttributeValue &value);

}  // namespace softcuda

#endif  // SOFTCUDA_LAUNCH_H
