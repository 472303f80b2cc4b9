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
  size_t bytes;                // of the value; the rest of the 64 is padding
  uint8_t default_bytes[2];    // the first bytes of the default, the others are zero
};

constexpr Known kKnown[] = {
    {CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, offsetof(CUaccessPolicyWindow, missProp) + sizeof(CUaccessProperty), {}},
    {CU_LAUNCH_ATTRIBUTE_COOPERATIVE, sizeof(int), {}},
    {CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, 3 * sizeof(unsigned), {}},
    {CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, sizeof(CUclusterSchedulingPolicy), {}},
    {CU_LAUNCH_ATTRIBUTE_PRIORITY, sizeof(int), {}},
    {CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, sizeof(CUlaunchMemSyncDomainMap), {0, 1}},
    {CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, sizeof(CUlaunchMemSyncDomain), {}},
    {CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION, 3 * sizeof(unsigned), {}},
    {CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, sizeof(int), {}},
    {CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, sizeof(unsigned), {}},
    {CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING, sizeof(unsigned), {}},
};

bool is_default(const Known &known, const uint8_t *value) {
  if (known.id == CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW) {  // a window of no bytes, whatever else it says
    size_t bytes = 0;
    std::memcpy(&bytes, value + offsetof(CUaccessPolicyWindow, num_bytes), sizeof bytes);
    return bytes == 0;
  }
  uint8_t expected[64] = {};
  std::memcpy(expected, known.default_bytes, sizeof known.default_bytes);
  return std::memcmp(value, expected, known.bytes) == 0;
}

}  // namespace

std::vector<fdy_attribute> read_attributes(CUgraphNode node) {
  std::vector<fdy_attribute> out;
  for (const Known &known : kKnown) {
    CUlaunchAttributeValue value{};
    const CUresult code = FDY_CU_RESULT(cuGraphKernelNodeGetAttribute, node, known.id, &value);
    if (code == CUDA_ERROR_INVALID_VALUE || code == CUDA_ERROR_NOT_SUPPORTED) continue;  // an older driver
    driver::check(code, "cuGraphKernelNodeGetAttribute");
    fdy_attribute attribute{};
    attribute.id = known.id;
    std::memcpy(attribute.value, &value, known.bytes);
    if (is_default(known, attribute.value)) continue;
    if (known.id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE)
      throw Error(FDY_ERROR_UNSUPPORTED, "a device-updatable kernel node holds a device handle that lives as long as its "
                                         "process: capture without that attribute");
    out.push_back(attribute);
  }
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
  return std::any_of(attributes.begin(), attributes.end(), [](const fdy_attribute &a) {
    return a.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && a.value[0] != 0;
  });
}

}  // namespace foundryd::graphs
