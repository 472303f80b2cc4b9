// SPDX-License-Identifier: Apache-2.0
#include "modules/registry.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "support/driver.h"
#include "support/error.h"
#include "support/mode.h"
#include "support/owner.h"

namespace foundryd::modules {
namespace {

std::string kernel_name(CUkernel kernel) {
  const char *name = nullptr;
  FDY_CU(cuKernelGetName, &name, kernel);
  return name;
}

}  // namespace

Registry &Registry::get() {
  static auto *registry = new Registry;  // never destroyed: the driver may call until the process is gone
  return *registry;
}

uint32_t Registry::add(fdy_module_api api, void *handle, const Extent &extent, std::string refusal) {
  Instance instance;
  instance.api = api;
  instance.handle = handle;
  instance.kind = extent.kind;
  instance.image_bytes = extent.bytes;
  instance.communication = communicating();
  instance.refusal = std::move(refusal);
  if (extent.bytes == 0 && instance.refusal.empty())
    instance.refusal = std::string("its image is ") + std::string(describe(extent.kind));

  std::shared_ptr<Image> fresh;
  if (extent.bytes != 0 && capturing() && !instance.communication) {
    const std::span<const std::byte> bytes(extent.data, extent.bytes);
    fresh = std::make_shared<Image>(Image{extent.kind, content_hash(bytes), {bytes.begin(), bytes.end()}});
  }

  const std::lock_guard lock(mutex_);
  if (fresh) {
    const auto [first, last] = images_.equal_range(fresh->hash);
    for (auto it = first; it != last && !instance.image; ++it)
      if (auto known = it->second.lock(); known && known->bytes == fresh->bytes) instance.image = std::move(known);
    if (!instance.image) {
      instance.image = fresh;
      images_.emplace(fresh->hash, fresh);
    }
  }
  // Who had the handle went unseen, with a context, say, and so did handles of its functions.
  remove_locked(api, handle);
  instance.id = static_cast<uint32_t>(instances_.size());
  instances_.push_back(std::move(instance));
  const uint32_t id = instances_.back().id;
  (api == FDY_LIBRARY_LOAD_DATA ? libraries_ : modules_)[handle] = id;
  return id;
}

std::optional<uint32_t> Registry::remove(fdy_module_api api, void *handle) {
  const std::lock_guard lock(mutex_);
  return remove_locked(api, handle);
}

void Registry::put_back(fdy_module_api api, void *handle, uint32_t id) {
  const std::lock_guard lock(mutex_);
  instances_[id].live = true;
  (api == FDY_LIBRARY_LOAD_DATA ? libraries_ : modules_)[handle] = id;
}

std::optional<uint32_t> Registry::remove_locked(fdy_module_api api, void *handle) {
  auto &handles = api == FDY_LIBRARY_LOAD_DATA ? libraries_ : modules_;
  const auto it = handles.find(handle);
  if (it == handles.end()) return std::nullopt;
  const uint32_t id = it->second;
  instances_[id].live = false;
  handles.erase(it);
  std::erase_if(library_modules_, [&](const auto &entry) { return entry.second == id; });
  std::erase_if(kernels_, [&](const auto &entry) { return entry.second.library == id; });
  ++epoch_;
  return id;
}

void Registry::note_module(CUlibrary library, CUmodule module) {
  const std::lock_guard lock(mutex_);
  if (const auto it = libraries_.find(library); it != libraries_.end()) library_modules_[module] = it->second;
}

void Registry::note_kernel(CUlibrary library, CUkernel kernel) {
  const std::lock_guard lock(mutex_);
  if (const auto it = libraries_.find(library); it != libraries_.end()) kernels_[kernel] = {it->second, kernel};
}

void Registry::note_function(CUkernel kernel, CUfunction function) {
  const std::lock_guard lock(mutex_);
  if (const auto it = kernels_.find(kernel); it != kernels_.end()) kernels_[function] = it->second;
}

CUkernel Registry::kernel_behind(CUfunction function) const {
  const std::lock_guard lock(mutex_);
  const auto it = kernels_.find(function);
  return it == kernels_.end() ? nullptr : it->second.kernel;
}

uint32_t Registry::library_of_kernel(CUkernel kernel) const {
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = kernels_.find(kernel); it != kernels_.end()) return it->second.library;
  }
  CUlibrary library = nullptr;
  FDY_CU(cuKernelGetLibrary, &library, kernel);
  const std::lock_guard lock(mutex_);
  const auto it = libraries_.find(library);
  return it == libraries_.end() ? FDY_NONE : it->second;
}

// A function of a library names the module behind the library, which only the library can tell.  Asking loads the
// library in full, so this is for functions whose kernel was never seen.
uint32_t Registry::library_of_module(CUmodule module) {
  std::vector<std::pair<uint32_t, CUlibrary>> candidates;
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = library_modules_.find(module); it != library_modules_.end()) return it->second;
    for (const auto &[handle, id] : libraries_) candidates.emplace_back(id, static_cast<CUlibrary>(handle));
  }
  // The newest first: functions are mostly asked about soon after their library is loaded.
  std::sort(candidates.begin(), candidates.end(), std::greater<>());
  for (const auto &[id, library] : candidates) {
    CUmodule behind = nullptr;
    if (FDY_CU_RESULT(cuLibraryGetModule, &behind, library) != CUDA_SUCCESS) continue;
    const std::lock_guard lock(mutex_);
    library_modules_[behind] = id;
    if (behind == module) return id;
  }
  return FDY_NONE;
}

FunctionName Registry::identify(CUfunction function, CUkernel kernel) {
  if (kernel == nullptr) kernel = kernel_behind(function);
  if (kernel != nullptr) {
    if (const uint32_t id = library_of_kernel(kernel); id != FDY_NONE) return {id, kernel_name(kernel)};
  }
  const char *name = nullptr;
  if (function != nullptr) {
    FDY_CU(cuFuncGetName, &name, function);
    CUmodule module = nullptr;
    FDY_CU(cuFuncGetModule, &module, function);
    uint32_t id = FDY_NONE;
    {
      const std::lock_guard lock(mutex_);
      if (const auto it = modules_.find(module); it != modules_.end()) id = it->second;
    }
    if (id == FDY_NONE) id = library_of_module(module);
    if (id != FDY_NONE) return {id, name};
  }
  throw Error(FDY_ERROR_NOT_FOUND,
              "the module of function %s was not seen being loaded: preload the hook with FOUNDRYD_MODE set before the "
              "program starts",
              name == nullptr ? kernel_name(kernel).c_str() : name);
}

void Registry::note_setting(const FunctionName &function, int32_t attribute, int32_t value) {
  const std::lock_guard lock(mutex_);
  int32_t &kept = instances_[function.module].settings[function.name].try_emplace(attribute, value).first->second;
  // It only allows launches, and a program may set it for each of them anew; nodes of all of them are built with one.
  kept = attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED ? std::max(kept, value) : value;
}

void Registry::note_global(fdy_module_api api, void *handle, const char *name) {
  const std::lock_guard lock(mutex_);
  const auto &handles = api == FDY_LIBRARY_LOAD_DATA ? libraries_ : modules_;
  if (const auto it = handles.find(handle); it != handles.end()) {
    instances_[it->second].asked_globals.insert(name);
  } else if (const auto behind = library_modules_.find(static_cast<CUmodule>(handle));
             api == FDY_MODULE_LOAD_DATA && behind != library_modules_.end()) {
    instances_[behind->second].asked_globals.insert(name);
  }
}

std::vector<fdy_module> Registry::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<fdy_module> out;
  out.reserve(instances_.size());
  for (const Instance &i : instances_)
    out.push_back({i.id, static_cast<uint32_t>(i.api), i.image_bytes, reinterpret_cast<uintptr_t>(i.handle),
                   i.live ? 1u : 0u, i.communication ? 1u : 0u});
  return out;
}

Instance Registry::copy(uint32_t id) const {
  const std::lock_guard lock(mutex_);
  if (id >= instances_.size())
    throw Error(FDY_ERROR_INVALID, "module %u does not exist: this process has %zu modules", id, instances_.size());
  return instances_[id];
}

Settings Registry::settings(const FunctionName &function) const {
  const std::lock_guard lock(mutex_);
  if (function.module >= instances_.size()) return {};
  const auto &all = instances_[function.module].settings;
  const auto it = all.find(function.name);
  return it == all.end() ? Settings{} : it->second;
}

uint64_t Registry::epoch() const {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

}  // namespace foundryd::modules
