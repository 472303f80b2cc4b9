// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <cstdio>
#include <cstring>
#include <utility>

#include "context.h"
#include "random.h"

namespace softcuda {

namespace {

constexpr char kName[] = "Software CUDA device (sm_90)";

// Values of a 9.0 device where code asks for them; every attribute that is not here is 0.
constexpr std::pair<CUdevice_attribute, int> kAttributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kMaxThreadsPerBlock},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, kSharedPerBlock},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, kMultiprocessors},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3201000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 62914560},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, kThreadsPerMultiprocessor},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, kBlocksPerMultiprocessor},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, kSharedPerMultiprocessor},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, kSharedPerBlockOptin},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
    {CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT, 4},
};

CUuuid uuid_of(CUdevice device) {
  CUuuid out{};
  for (int half = 0; half < 2; ++half) {
    const uint64_t word = mix(mix(0x736f6674637564u + static_cast<uint64_t>(half)) ^ static_cast<uint64_t>(device));
    std::memcpy(out.bytes + 8 * half, &word, sizeof word);
  }
  return out;
}

}  // namespace

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuDeviceGetCount(int *count) {
  return locked_call([&] {
    require(count != nullptr);
    *count = static_cast<int>(process().devices.size());
  });
}

SOFTCUDA_API cuDeviceGet(CUdevice *device, int ordinal) {
  return locked_call([&] {
    require(device != nullptr);
    *device = device_at(ordinal).ordinal;
  });
}

SOFTCUDA_API cuDeviceGetName(char *name, int len, CUdevice dev) {
  return locked_call([&] {
    require(name != nullptr && len > 0);
    device_at(dev);
    std::snprintf(name, static_cast<size_t>(len), "%s", kName);
  });
}

SOFTCUDA_API cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) {
  return locked_call([&] {
    require(uuid != nullptr);
    *uuid = uuid_of(device_at(dev).ordinal);
  });
}

SOFTCUDA_API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev) {
  return locked_call([&] {
    require(uuid != nullptr);
    *uuid = uuid_of(device_at(dev).ordinal);
  });
}

SOFTCUDA_API cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
  return locked_call([&] {
    require(bytes != nullptr);
    device_at(dev);
    *bytes = process().settings.memory;
  });
}

SOFTCUDA_API cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) {
  return locked_call([&] {
    require(pi != nullptr && attrib > 0 && attrib < CU_DEVICE_ATTRIBUTE_MAX);
    device_at(dev);
    *pi = 0;
    if (attrib == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) *pi = dev + 1;
    for (const auto &[id, value] : kAttributes) {
      if (id == attrib) *pi = value;
    }
  });
}

SOFTCUDA_API cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev) {
  return locked_call([&] {
    require(pciBusId != nullptr && len >= 13);
    std::snprintf(pciBusId, static_cast<size_t>(len), "0000:%02X:00.0", device_at(dev).ordinal + 1);
  });
}

SOFTCUDA_API cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId) {
  return locked_call([&] {
    require(dev != nullptr && pciBusId != nullptr);
    unsigned domain = 0;
    unsigned bus = 0;
    unsigned slot = 0;
    const bool full = std::sscanf(pciBusId, "%x:%x:%x", &domain, &bus, &slot) == 3;
    require(full || std::sscanf(pciBusId, "%x:%x", &bus, &slot) == 2);
    *dev = device_at(static_cast<CUdevice>(bus) - 1).ordinal;
  });
}

SOFTCUDA_API cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev) {
  return locked_call([&] {
    require(canAccessPeer != nullptr);
    device_at(dev);
    device_at(peerDev);
    *canAccessPeer = dev != peerDev ? 1 : 0;
  });
}

SOFTCUDA_API cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice) {
  return locked_call([&] {
    require(value != nullptr);
    device_at(srcDevice);
    device_at(dstDevice);
    require(srcDevice != dstDevice, CUDA_ERROR_INVALID_DEVICE);
    *value = attrib == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ? 1 : 0;
  });
}

SOFTCUDA_API cuDeviceGetExecAffinitySupport(int *pi, CUexecAffinityType, CUdevice dev) {
  return locked_call([&] {
    require(pi != nullptr);
    device_at(dev);
    *pi = 0;
  });
}

SOFTCUDA_API cuDeviceGetLuid(char *, unsigned int *, CUdevice dev) {
  return locked_call([&] {
    device_at(dev);
    throw Failure{CUDA_ERROR_NOT_SUPPORTED};
  });
}
