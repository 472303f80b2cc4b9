// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "context.h"
#include "device.h"
#include "module.h"

namespace softcuda {

int function_attribute(const KernelEntry &, const FunctionSettings &settings, CUfunction_attribute attribute) {
  if (const auto it = settings.find(attribute); it != settings.end()) return it->second;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return kMaxThreadsPerBlock;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      return 32;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      return 90;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      return kSharedPerBlock;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return -1;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      return 0;
    default:
      throw Failure{CUDA_ERROR_INVALID_VALUE};
  }
}

void set_function_attribute(FunctionSettings &settings, CUfunction_attribute attribute, int value) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      require(value >= 0 && value <= kSharedPerBlockOptin);
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      require(value >= -1 && value <= 100);
      break;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      require(value == 0 || value == 1);
      break;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      require(value >= CU_CLUSTER_SCHEDULING_POLICY_DEFAULT && value <= CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING);
      break;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
      require(value >= 0);
      break;
    default:
      throw Failure{CUDA_ERROR_INVALID_VALUE};
  }
  settings[attribute] = value;
}

void parameter_info(const KernelEntry &entry, size_t index, size_t *offset, size_t *bytes) {
  require(offset != nullptr && index < entry.param_count);
  *offset = entry.param_offsets[index];
  if (bytes != nullptr) *bytes = entry.param_sizes[index];
}

}  // namespace softcuda

using namespace softcuda;

namespace {

// A kernel in the place of a function is an invalid handle here.
std::shared_ptr<Function> function_at(CUfunction handle) {
  return process().functions.get(handle);
}

}  // namespace

SOFTCUDA_API cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc) {
  return locked_call([&] {
    require(pi != nullptr);
    const auto function = function_at(hfunc);
    *pi = function_attribute(*function->entry, function->settings, attrib);
  });
}

SOFTCUDA_API cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
  return locked_call([&] { set_function_attribute(function_at(hfunc)->settings, attrib, value); });
}

SOFTCUDA_API cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache) {
  return locked_call([&] { function_at(hfunc); });
}

SOFTCUDA_API cuFuncGetModule(CUmodule *hmod, CUfunction hfunc) {
  return locked_call([&] {
    require(hmod != nullptr);
    *hmod = Handles<Module, CUmodule>::handle(function_at(hfunc)->module.lock());
  });
}

SOFTCUDA_API cuFuncGetName(const char **name, CUfunction hfunc) {
  return locked_call([&] {
    require(name != nullptr);
    *name = function_at(hfunc)->name.c_str();
  });
}

SOFTCUDA_API cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t *paramOffset, size_t *paramSize) {
  return locked_call([&] { parameter_info(*function_at(func)->entry, paramIndex, paramOffset, paramSize); });
}

SOFTCUDA_API cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function) {
  return locked_call([&] {
    require(state != nullptr);
    *state = function_at(function)->loaded ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
  });
}

SOFTCUDA_API cuFuncLoad(CUfunction function) {
  return call([&] {
    Lock lock = lock_process();
    ensure_loaded(lock, function_at(function));
  });
}

SOFTCUDA_API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *numBlocks, CUfunction func, int blockSize,
                                                                  size_t dynamicSMemSize, unsigned int) {
  return locked_call([&] {
    require(numBlocks != nullptr && blockSize > 0);
    const auto function = callee_at(func);
    const int by_threads = blockSize > kMaxThreadsPerBlock ? 0 : kThreadsPerMultiprocessor / blockSize;
    const size_t reserved = dynamicSMemSize + 1024;
    const int by_shared = static_cast<int>(kSharedPerMultiprocessor / reserved);
    *numBlocks = std::min({by_threads, by_shared, kBlocksPerMultiprocessor});
  });
}

SOFTCUDA_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, CUfunction func, int blockSize,
                                                         size_t dynamicSMemSize) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize, dynamicSMemSize, 0);
}

SOFTCUDA_API cuOccupancyMaxPotentialBlockSizeWithFlags(int *minGridSize, int *blockSize, CUfunction func,
                                                       CUoccupancyB2DSize, size_t, int blockSizeLimit, unsigned int) {
  return locked_call([&] {
    require(minGridSize != nullptr && blockSize != nullptr);
    callee_at(func);
    *blockSize = blockSizeLimit > 0 ? std::min(blockSizeLimit, kMaxThreadsPerBlock) : kMaxThreadsPerBlock;
    *minGridSize = kMultiprocessors * (kThreadsPerMultiprocessor / *blockSize);
  });
}

SOFTCUDA_API cuOccupancyMaxPotentialBlockSize(int *minGridSize, int *blockSize, CUfunction func,
                                              CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize,
                                              int blockSizeLimit) {
  return cuOccupancyMaxPotentialBlockSizeWithFlags(minGridSize, blockSize, func, blockSizeToDynamicSMemSize,
                                                   dynamicSMemSize, blockSizeLimit, 0);
}
