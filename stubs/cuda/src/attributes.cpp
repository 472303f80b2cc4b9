// SPDX-License-Identifier: Apache-2.0
//
// Attributes of kernel nodes, and of launches where they become such.
#include <cstring>

#include "graph.h"
#include "launch.h"
#include "stream.h"

namespace softcuda {

bool is_node_attribute(CUlaunchAttributeID id) {
  switch (id) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
    case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return true;
    default:
      return false;
  }
}

void check_node_attribute(CUlaunchAttributeID id, const CUlaunchAttributeValue &value) {
  require(is_node_attribute(id));
  switch (id) {
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      require(value.clusterSchedulingPolicyPreference <= CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING);
      return;
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      require(value.memSyncDomain <= CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE);
      return;
    case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
      require(value.deviceUpdatableKernelNode.deviceUpdatable == 0, CUDA_ERROR_NOT_SUPPORTED);
      return;
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      require(static_cast<int>(value.sharedMemCarveout) >= -1 && static_cast<int>(value.sharedMemCarveout) <= 100);
      return;
    default:
      return;
  }
}

namespace {

CUlaunchAttributeValue default_value(CUlaunchAttributeID id) {
  CUlaunchAttributeValue value{};
  if (id == CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP) value.memSyncDomainMap = {0, 1};
  return value;
}

// The bytes of a value that the attribute uses.
size_t used_bytes(CUlaunchAttributeID id) {
  constexpr CUlaunchAttributeValue *value = nullptr;
  switch (id) {
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      return sizeof(value->accessPolicyWindow);
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      return sizeof(value->clusterDim);
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      return sizeof(value->memSyncDomainMap);
    case CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
      return sizeof(value->deviceUpdatableKernelNode);
    default:
      return sizeof(int);
  }
}

}  // namespace

void check_node_attributes(const KernelWork &work, const Attributes &attributes) {
  check_attributes(work, attributes);
  const auto cooperative = attributes.find(CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
  require(cooperative == attributes.end() || cooperative->second.cooperative == 0 || !work.arguments->from_extra);
}

CUlaunchAttributeValue clean_attribute(CUlaunchAttributeID id, const CUlaunchAttributeValue &value) {
  CUlaunchAttributeValue out{};
  std::memcpy(&out, &value, used_bytes(id));
  if (id == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
    out.priority = out.priority > kLeastPriority      ? kLeastPriority
                   : out.priority < kGreatestPriority ? kGreatestPriority
                                                      : out.priority;
  }
  return out;
}

void write_node_attribute(CUlaunchAttributeValue *out, CUlaunchAttributeID id, const Attributes &attributes) {
  require(is_node_attribute(id));
  const auto it = attributes.find(id);
  const CUlaunchAttributeValue value = it == attributes.end() ? default_value(id) : it->second;
  if (id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE) {
    // Field by field: what lies between them stays as it is.
    out->deviceUpdatableKernelNode.deviceUpdatable = value.deviceUpdatableKernelNode.deviceUpdatable;
    out->deviceUpdatableKernelNode.devNode = value.deviceUpdatableKernelNode.devNode;
    return;
  }
  std::memcpy(out, &value, used_bytes(id));
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr,
                                           CUkernelNodeAttrValue *value_out) {
  return locked_call([&] {
    require(value_out != nullptr);
    const auto node = node_at(hNode);
    work_of<KernelWork>(*node);
    write_node_attribute(value_out, attr, node->attributes);
  });
}

SOFTCUDA_API cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr,
                                           const CUkernelNodeAttrValue *value) {
  return locked_call([&] {
    require(value != nullptr);
    const auto node = node_at(hNode);
    const auto &work = work_of<KernelWork>(*node);
    check_node_attribute(attr, *value);
    Attributes attributes = node->attributes;
    attributes[attr] = clean_attribute(attr, *value);
    check_node_attributes(work, attributes);
    node->attributes = std::move(attributes);
  });
}

SOFTCUDA_API cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src) {
  return locked_call([&] {
    const auto to = node_at(dst);
    const auto from = node_at(src);
    require(work_of<KernelWork>(*to).context == work_of<KernelWork>(*from).context);
    check_node_attributes(work_of<KernelWork>(*to), from->attributes);
    to->attributes = from->attributes;
  });
}
