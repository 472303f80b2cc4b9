// SPDX-License-Identifier: Apache-2.0
#include "graphs/attributes.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "support/driver.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

static_assert(sizeof(CUlaunchAttributeValue) == sizeof(fdy_attribute::value));

struct Known {
  CUlaunchAttributeID id;
  size_t bytes;  // of the value; the rest of the 64 is padding
};

constexpr Known kKnown[] = {
    {CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, offsetof(CUaccessPolicyWindow, missProp) + sizeof(CUaccessProperty)},
    {CU_LAUNCH_ATTRIBUTE_COOPERATIVE, sizeof(int)},
    {CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, 3 * sizeof(unsigned)},
    {CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, sizeof(CUclusterSchedulingPolicy)},
    {CU_LAUNCH_ATTRIBUTE_PRIORITY, sizeof(int)},
    {CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, sizeof(CUlaunchMemSyncDomainMap)},
    {CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, sizeof(CUlaunchMemSyncDomain)},
    {CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION, 3 * sizeof(unsigned)},
    {CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, sizeof(int)},
    {CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, sizeof(unsigned)},
    {CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING, sizeof(unsigned)},
};

// All that the driver answers, by ascending id.
std::vector<fdy_attribute> read_all(CUgraphNode node) {
  std::vector<fdy_attribute> out;
  for (const Known &known : kKnown) {
    CUlaunchAttributeValue value{};
    const CUresult code = FDY_CU_RESULT(cuGraphKernelNodeGetAttribute, node, known.id, &value);
    if (code == CUDA_ERROR_INVALID_VALUE || code == CUDA_ERROR_NOT_SUPPORTED) continue;  // an older driver
    driver::check(code, "cuGraphKernelNodeGetAttribute");
    fdy_attribute attribute{};
    attribute.id = known.id;
    std::memcpy(attribute.value, &value, known.bytes);
    out.push_back(attribute);
  }
  return out;
}

bool same(const fdy_attribute &a, const fdy_attribute &b) {
  return a.id == b.id && std::memcmp(a.value, b.value, sizeof a.value) == 0;
}

}  // namespace

const std::vector<fdy_attribute> &AttributeReader::defaults(const CUDA_KERNEL_NODE_PARAMS_v2 &params) {
  const void *key = params.func != nullptr ? static_cast<const void *>(params.func) : params.kern;
  const auto it = defaults_.find(key);
  if (it != defaults_.end()) return it->second;
  if (!scratch_) scratch_.emplace(create_graph());
  CUgraphNode fresh = nullptr;
  // What the function allows may have been set anew for a later launch.
  CUDA_KERNEL_NODE_PARAMS_v2 any = params;
  any.sharedMemBytes = 0;
  FDY_CU(cuGraphAddKernelNode_v2, &fresh, scratch_->get(), nullptr, 0, &any);
  return defaults_.emplace(key, read_all(fresh)).first->second;
}

std::vector<fdy_attribute> AttributeReader::read(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 &params) {
  std::vector<fdy_attribute> out = read_all(node);
  const std::vector<fdy_attribute> &usual = defaults(params);
  std::erase_if(out, [&](const fdy_attribute &a) {
    return std::any_of(usual.begin(), usual.end(), [&](const fdy_attribute &u) { return same(a, u); });
  });
  for (const fdy_attribute &a : out)
    if (a.id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE)
      throw Error(FDY_ERROR_UNSUPPORTED,
                  "a device-updatable kernel node holds a device handle that lives as long as its "
                  "process: capture without that attribute");
  return out;
}

bool is_node_attribute(uint32_t id) {
  return id != CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE &&
         std::any_of(std::begin(kKnown), std::end(kKnown),
                     [&](const Known &k) { return static_cast<uint32_t>(k.id) == id; });
}

void write_attributes(CUgraphNode node, std::span<const fdy_attribute> attributes) {
  for (const fdy_attribute &attribute : attributes) {
    CUlaunchAttributeValue value{};
    std::memcpy(&value, attribute.value, sizeof value);
    FDY_CU(cuGraphKernelNodeSetAttribute, node, static_cast<CUlaunchAttributeID>(attribute.id), &value);
  }
}

bool is_cooperative(std::span<const fdy_attribute> attributes) {
  return std::any_of(attributes.begin(), attributes.end(),
                     [](const fdy_attribute &a) { return a.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && a.value[0] != 0; });
}

}  // namespace foundryd::graphs
