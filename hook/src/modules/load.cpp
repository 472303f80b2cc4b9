// SPDX-License-Identifier: Apache-2.0
#include "modules/load.h"

#include <cstring>
#include <vector>

#include "graphs/capture_mode.h"
#include "modules/functions.h"
#include "modules/image.h"
#include "modules/registry.h"
#include "support/counters.h"
#include "support/driver.h"
#include "support/error.h"

namespace foundryd::modules {
namespace {

void apply(CUfunction function, const char *name, const fdy_setting &setting) {
  const CUresult code = setting.attribute == FDY_SETTING_CACHE_CONFIG
                            ? FDY_CU_RESULT(cuFuncSetCacheConfig, function, static_cast<CUfunc_cache>(setting.value))
                            : FDY_CU_RESULT(cuFuncSetAttribute, function,
                                            static_cast<CUfunction_attribute>(setting.attribute), setting.value);
  if (code == CUDA_SUCCESS) return;
  const Error cause = Error::driver(code, "cuFuncSetAttribute");
  throw Error(FDY_ERROR_DRIVER,
              "attribute %d of function %.200s cannot be set to %d (%.120s): the archive is not for "
              "this driver and device",
              setting.attribute, name, setting.value, cause.what());
}

}  // namespace

void *load_image(fdy_module_api api, std::span<const std::byte> image) {
  // Archive sections are aligned; a caller's own bytes need not be, and the driver reads words.
  std::vector<uint64_t> aligned;
  const void *data = image.data();
  if (reinterpret_cast<uintptr_t>(data) % alignof(uint64_t) != 0) {
    aligned.resize((image.size() + 7) / 8);
    std::memcpy(aligned.data(), image.data(), image.size());
    data = aligned.data();
  }
  count(&fdy_counters::module_loads);
  if (api == FDY_LIBRARY_LOAD_DATA) {
    CUlibrary library = nullptr;
    FDY_CU(cuLibraryLoadData, &library, data, nullptr, nullptr, 0, nullptr, nullptr, 0);
    return library;
  }
  CUmodule module = nullptr;
  FDY_CU(cuModuleLoadData, &module, data);
  return module;
}

void unload_image(fdy_module_api api, void *handle) noexcept {
  if (api == FDY_LIBRARY_LOAD_DATA) {
    FDY_CU_RESULT(cuLibraryUnload, static_cast<CUlibrary>(handle));
  } else {
    FDY_CU_RESULT(cuModuleUnload, static_cast<CUmodule>(handle));
  }
}

Resolved resolve_function(fdy_module_api api, void *handle, const char *name) {
  Resolved out;
  if (api == FDY_LIBRARY_LOAD_DATA) {
    const CUresult code = FDY_CU_RESULT(cuLibraryGetKernel, &out.kernel, static_cast<CUlibrary>(handle), name);
    if (code == CUDA_ERROR_NOT_FOUND) return {};
    driver::check(code, "cuLibraryGetKernel");
    FDY_CU(cuKernelGetFunction, &out.function, out.kernel);
    return out;
  }
  const CUresult code = FDY_CU_RESULT(cuModuleGetFunction, &out.function, static_cast<CUmodule>(handle), name);
  if (code == CUDA_ERROR_NOT_FOUND) return {};
  driver::check(code, "cuModuleGetFunction");
  return out;
}

uint32_t load_module(uint32_t api, std::span<const std::byte> image) {
  if (api != FDY_MODULE_LOAD_DATA && api != FDY_LIBRARY_LOAD_DATA)
    throw Error(FDY_ERROR_INVALID, "%u is not a way to load a module: use 0 (module) or 1 (library)", api);
  const Extent extent = measure_exactly(image);
  if (extent.bytes == 0)
    throw Error(FDY_ERROR_INVALID,
                "the %zu bytes of a module image are not exactly one fat binary, ELF file or "
                "NUL-terminated PTX: the image is damaged",
                image.size());
  const graphs::RelaxedCapture relaxed;
  const auto which = static_cast<fdy_module_api>(api);
  void *handle = load_image(which, image);
  try {
    return Registry::get().add(which, handle, extent, {});
  } catch (...) {
    unload_image(which, handle);
    throw;
  }
}

CUfunction load_function(uint32_t module, const char *name, std::span<const fdy_setting> settings) {
  const Instance instance = Registry::get().copy(module);
  if (!instance.live)
    throw Error(FDY_ERROR_STATE, "module %u was unloaded: function %.200s cannot be loaded", module, name);
  const graphs::RelaxedCapture relaxed;
  const Resolved found = resolve_function(instance.api, instance.handle, name);
  if (found.function == nullptr)
    throw Error(FDY_ERROR_NOT_FOUND, "module %u has no function named %.300s: the image is not the recorded one",
                module, name);
  if (found.kernel != nullptr) {
    Registry::get().note_kernel(static_cast<CUlibrary>(instance.handle), found.kernel);
    Registry::get().note_function(found.kernel, found.function);
  }
  for (const fdy_setting &setting : settings) {
    apply(found.function, name, setting);
    Registry::get().note_setting({module, name}, setting.attribute, setting.value);
  }
  // A lazy load could synchronise against a collective that spins for us.
  if (FDY_CU_HAS(cuFuncLoad)) FDY_CU(cuFuncLoad, found.function);
  keep_layout(found.function);
  return found.function;
}

}  // namespace foundryd::modules
