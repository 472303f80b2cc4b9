// SPDX-License-Identifier: Apache-2.0
//
// Every module instance of this process, in load order, and what was set on its functions.
#ifndef FOUNDRYD_HOOK_MODULES_REGISTRY_H
#define FOUNDRYD_HOOK_MODULES_REGISTRY_H

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "foundryd/records.h"
#include "modules/image.h"
#include "support/cuda.h"

namespace foundryd::modules {

struct Image {
  ImageKind kind;
  uint64_t hash;
  std::vector<std::byte> bytes;
};

using Settings = std::map<int32_t, int32_t>;  // CUfunction_attribute (or FDY_SETTING_CACHE_CONFIG) to value

struct Instance {
  uint32_t id = 0;
  fdy_module_api api = FDY_MODULE_LOAD_DATA;
  void *handle = nullptr;
  ImageKind kind = ImageKind::kUnknown;
  uint64_t image_bytes = 0;
  std::shared_ptr<const Image> image;  // only while recording, and not for communication libraries
  bool live = true;
  bool communication = false;
  std::string refusal;  // why this instance cannot be archived; empty if it can
  std::set<std::string> asked_globals;
  std::map<std::string, Settings> settings;  // by function name
};

struct FunctionName {
  uint32_t module;
  std::string name;
};

class Registry {
 public:
  static Registry &get();

  // Notes a load that succeeded.  `options` is the JIT options' summary: a reason to refuse, or empty.
  uint32_t add(fdy_module_api api, void *handle, const Extent &extent, std::string refusal);
  // For a module that is about to be unloaded: another thread may be given its handle as soon as the driver lets it go.
  // Answers with its id if it was known.
  std::optional<uint32_t> remove(fdy_module_api api, void *handle);
  void put_back(fdy_module_api api, void *handle, uint32_t id);

  // The module behind a library, through which programs may ask for its globals.
  void note_module(CUlibrary library, CUmodule module);
  // A kernel that a library handed out, and the function that the driver made of it.  Programs pass either as a
  // CUfunction.
  void note_kernel(CUlibrary library, CUkernel kernel);
  void note_function(CUkernel kernel, CUfunction function);
  // The kernel that `function` is or was made of; nullptr for a module's function.
  CUkernel kernel_behind(CUfunction function) const;

  // Which instance a function is of, whoever handed it out; one of the handles may be nullptr.  Throws Error if its
  // module was not seen being loaded.
  FunctionName identify(CUfunction function, CUkernel kernel);

  void note_setting(const FunctionName &function, int32_t attribute, int32_t value);
  void note_global(fdy_module_api api, void *handle, const char *name);

  std::vector<fdy_module> list() const;
  Instance copy(uint32_t id) const;  // throws Error for an unknown id
  Settings settings(const FunctionName &function) const;

  // Changes with every unload: handles seen before may mean something else now.
  uint64_t epoch() const;

 private:
  struct KnownKernel {
    uint32_t library;
    CUkernel kernel;
  };

  std::optional<uint32_t> remove_locked(fdy_module_api api, void *handle);
  uint32_t library_of_kernel(CUkernel kernel) const;
  uint32_t library_of_module(CUmodule module);

  mutable std::mutex mutex_;
  std::deque<Instance> instances_;
  std::unordered_map<void *, uint32_t> modules_, libraries_;  // live handles
  std::unordered_map<void *, KnownKernel> kernels_;           // by kernel and by function
  std::unordered_map<CUmodule, uint32_t> library_modules_;    // the module behind a library, once asked for
  std::unordered_multimap<uint64_t, std::weak_ptr<const Image>> images_;
  uint64_t epoch_ = 0;
};

}  // namespace foundryd::modules

#endif  // FOUNDRYD_HOOK_MODULES_REGISTRY_H
