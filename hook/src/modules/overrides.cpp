// SPDX-License-Identifier: Apache-2.0
//
// The driver functions through which modules, functions and globals come to be.
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "interpose/concepts.h"
#include "modules/registry.h"
#include "support/counters.h"
#include "support/error.h"
#include "support/log.h"
#include "support/mode.h"

namespace foundryd::modules {
namespace {

// The driver has done its part: whatever goes wrong in the recording must not reach the program.  What was not
// recorded is missed by name when a graph uses it.
template <class Body>
void record(const char *what, Body &&body) noexcept {
  try {
    body();
  } catch (const std::exception &error) {
    warn("%s was not recorded: %s", what, error.what());
  }
}

// JIT options with which a compiler makes other code than without.
bool changes_code(CUjit_option option) {
  switch (option) {
    case CU_JIT_WALL_TIME:
    case CU_JIT_INFO_LOG_BUFFER:
    case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
    case CU_JIT_ERROR_LOG_BUFFER:
    case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
    case CU_JIT_TARGET_FROM_CUCONTEXT:
    case CU_JIT_LOG_VERBOSE:
    case CU_JIT_CACHE_MODE:
    case CU_JIT_GLOBAL_SYMBOL_COUNT:  // alone it says nothing
      return false;
    default:
      return true;
  }
}

// The device's architecture, 90 for sm_90; 0, which nothing is code for, if there is no telling.
unsigned architecture() {
  CUdevice device = 0;  // a library may be loaded without a context
  FDY_CU_RESULT(cuCtxGetDevice, &device);
  int major = 0, minor = 0;
  if (FDY_CU_RESULT(cuDeviceGetAttribute, &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) !=
          CUDA_SUCCESS ||
      FDY_CU_RESULT(cuDeviceGetAttribute, &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device) != CUDA_SUCCESS)
    return 0;
  return static_cast<unsigned>(10 * major + minor);
}

// Compiled code is what it is, but for symbols that the program gives addresses; other options are for what the driver
// compiles.
std::string refused_options(const Extent &extent, unsigned count, const CUjit_option *options) {
  for (unsigned i = 0; options != nullptr && i < count; ++i) {
    const CUjit_option option = options[i];
    if (option == CU_JIT_GLOBAL_SYMBOL_NAMES || option == CU_JIT_GLOBAL_SYMBOL_ADDRESSES)
      return "the program gave symbols of it addresses with JIT option " + std::to_string(static_cast<int>(option));
    if (changes_code(option) && may_be_compiled(extent, architecture()))
      return "it may have been compiled from PTX with JIT option " + std::to_string(static_cast<int>(option));
  }
  return {};
}

void note_load(fdy_module_api api, void *handle, const void *image, unsigned option_count,
               const CUjit_option *options) noexcept {
  count(&fdy_counters::module_loads);
  record("a loaded module", [&] {
    const Extent extent = measure(image);
    Registry::get().add(api, handle, extent, refused_options(extent, option_count, options));
  });
}

void note_load_from_file(fdy_module_api api, void *handle, const char *path, unsigned option_count,
                         const CUjit_option *options) noexcept {
  count(&fdy_counters::module_loads);
  record("a module loaded from a file", [&] {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    bytes.push_back('\0');  // ends PTX; any other image knows its size
    const auto *data = reinterpret_cast<const std::byte *>(bytes.data());
    Extent extent = measure_prefix({data, bytes.size()});
    Registry::get().add(api, handle, extent, refused_options(extent, option_count, options));
  });
}

template <class Call>
CUresult unloaded(fdy_module_api api, void *handle, Call &&call) noexcept {
  std::optional<uint32_t> id;
  record("the end of a module", [&] { id = Registry::get().remove(api, handle); });
  const CUresult code = call();
  if (code != CUDA_SUCCESS && id) record("a module that stays", [&] { Registry::get().put_back(api, handle, *id); });
  return code;
}

void note_setting(CUfunction function, CUkernel kernel, int32_t attribute, int32_t value) noexcept {
  record("a function attribute", [&] {
    Registry &registry = Registry::get();
    registry.note_setting(registry.identify(function, kernel), attribute, value);
  });
}

}  // namespace
}  // namespace foundryd::modules

using foundryd::overriding;
using namespace foundryd::modules;

FDY_OVERRIDE CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *path) {
  const CUresult code = FDY_NEXT(cuModuleLoad, module, path);
  if (code == CUDA_SUCCESS && overriding()) note_load_from_file(FDY_MODULE_LOAD_DATA, *module, path, 0, nullptr);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image) {
  const CUresult code = FDY_NEXT(cuModuleLoadData, module, image);
  if (code == CUDA_SUCCESS && overriding()) note_load(FDY_MODULE_LOAD_DATA, *module, image, 0, nullptr);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int option_count,
                                                 CUjit_option *options, void **values) {
  const CUresult code = FDY_NEXT(cuModuleLoadDataEx, module, image, option_count, options, values);
  if (code == CUDA_SUCCESS && overriding()) note_load(FDY_MODULE_LOAD_DATA, *module, image, option_count, options);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *image) {
  const CUresult code = FDY_NEXT(cuModuleLoadFatBinary, module, image);
  if (code == CUDA_SUCCESS && overriding()) note_load(FDY_MODULE_LOAD_DATA, *module, image, 0, nullptr);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuModuleUnload(CUmodule module) {
  if (!overriding()) return FDY_NEXT(cuModuleUnload, module);
  return unloaded(FDY_MODULE_LOAD_DATA, module, [&] { return FDY_NEXT(cuModuleUnload, module); });
}

FDY_OVERRIDE CUresult CUDAAPI cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module,
                                                   const char *name) {
  const CUresult code = FDY_NEXT(cuModuleGetGlobal_v2, address, bytes, module, name);
  if (code == CUDA_SUCCESS && overriding())
    record("a global", [&] { Registry::get().note_global(FDY_MODULE_LOAD_DATA, module, name); });
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *options,
                                                void **values, unsigned int option_count,
                                                CUlibraryOption *library_options, void **library_values,
                                                unsigned int library_option_count) {
  const CUresult code = FDY_NEXT(cuLibraryLoadData, library, image, options, values, option_count, library_options,
                                 library_values, library_option_count);
  if (code == CUDA_SUCCESS && overriding()) note_load(FDY_LIBRARY_LOAD_DATA, *library, image, option_count, options);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options,
                                                    void **values, unsigned int option_count,
                                                    CUlibraryOption *library_options, void **library_values,
                                                    unsigned int library_option_count) {
  const CUresult code = FDY_NEXT(cuLibraryLoadFromFile, library, path, options, values, option_count, library_options,
                                 library_values, library_option_count);
  if (code == CUDA_SUCCESS && overriding())
    note_load_from_file(FDY_LIBRARY_LOAD_DATA, *library, path, option_count, options);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
  if (!overriding()) return FDY_NEXT(cuLibraryUnload, library);
  return unloaded(FDY_LIBRARY_LOAD_DATA, library, [&] { return FDY_NEXT(cuLibraryUnload, library); });
}

FDY_OVERRIDE CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library,
                                                 const char *name) {
  const CUresult code = FDY_NEXT(cuLibraryGetGlobal, address, bytes, library, name);
  if (code == CUDA_SUCCESS && overriding())
    record("a global", [&] { Registry::get().note_global(FDY_LIBRARY_LOAD_DATA, library, name); });
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuLibraryGetModule(CUmodule *module, CUlibrary library) {
  const CUresult code = FDY_NEXT(cuLibraryGetModule, module, library);
  if (code == CUDA_SUCCESS && overriding())
    record("the module behind a library", [&] { Registry::get().note_module(library, *module); });
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
  const CUresult code = FDY_NEXT(cuLibraryGetKernel, kernel, library, name);
  if (code == CUDA_SUCCESS && overriding()) record("a kernel", [&] { Registry::get().note_kernel(library, *kernel); });
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int count, CUlibrary library) {
  const CUresult code = FDY_NEXT(cuLibraryEnumerateKernels, kernels, count, library);
  if (code == CUDA_SUCCESS && overriding())
    record("kernels", [&] {
      for (unsigned int i = 0; i < count && kernels[i] != nullptr; ++i)
        Registry::get().note_kernel(library, kernels[i]);
    });
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
  const CUresult code = FDY_NEXT(cuKernelGetFunction, function, kernel);
  if (code == CUDA_SUCCESS && overriding())
    record("a function", [&] { Registry::get().note_function(kernel, *function); });
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  const CUresult code = FDY_NEXT(cuFuncSetAttribute, function, attribute, value);
  if (code == CUDA_SUCCESS && overriding()) note_setting(function, nullptr, attribute, value);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  const CUresult code = FDY_NEXT(cuFuncSetCacheConfig, function, config);
  if (code == CUDA_SUCCESS && overriding()) note_setting(function, nullptr, FDY_SETTING_CACHE_CONFIG, config);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                                   CUdevice device) {
  const CUresult code = FDY_NEXT(cuKernelSetAttribute, attribute, value, kernel, device);
  if (code == CUDA_SUCCESS && overriding()) note_setting(nullptr, kernel, attribute, value);
  return code;
}

FDY_OVERRIDE CUresult CUDAAPI cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device) {
  const CUresult code = FDY_NEXT(cuKernelSetCacheConfig, kernel, config, device);
  if (code == CUDA_SUCCESS && overriding()) note_setting(nullptr, kernel, FDY_SETTING_CACHE_CONFIG, config);
  return code;
}

namespace foundryd::modules {

std::span<const Row> rows() {
  static const Row table[] = {
      FDY_ROW("cuModuleLoad", cuModuleLoad, 2000),
      FDY_ROW("cuModuleLoadData", cuModuleLoadData, 2000),
      FDY_ROW("cuModuleLoadDataEx", cuModuleLoadDataEx, 2010),
      FDY_ROW("cuModuleLoadFatBinary", cuModuleLoadFatBinary, 2000),
      FDY_ROW("cuModuleUnload", cuModuleUnload, 2000),
      FDY_ROW("cuModuleGetGlobal", cuModuleGetGlobal_v2, 3020),
      FDY_ROW("cuLibraryLoadData", cuLibraryLoadData, 12000),
      FDY_ROW("cuLibraryLoadFromFile", cuLibraryLoadFromFile, 12000),
      FDY_ROW("cuLibraryUnload", cuLibraryUnload, 12000),
      FDY_ROW("cuLibraryGetGlobal", cuLibraryGetGlobal, 12000),
      FDY_ROW("cuLibraryGetModule", cuLibraryGetModule, 12000),
      FDY_ROW("cuLibraryGetKernel", cuLibraryGetKernel, 12000),
      FDY_ROW("cuLibraryEnumerateKernels", cuLibraryEnumerateKernels, 12040),
      FDY_ROW("cuKernelGetFunction", cuKernelGetFunction, 12000),
      FDY_ROW("cuFuncSetAttribute", cuFuncSetAttribute, 9000),
      FDY_ROW("cuFuncSetCacheConfig", cuFuncSetCacheConfig, 3000),
      FDY_ROW("cuKernelSetAttribute", cuKernelSetAttribute, 12000),
      FDY_ROW("cuKernelSetCacheConfig", cuKernelSetCacheConfig, 12000),
  };
  return table;
}

}  // namespace foundryd::modules
