// SPDX-License-Identifier: Apache-2.0
//
// An image loaded for a look and unloaded again, unknown to the registry.
#ifndef FOUNDRYD_HOOK_MODULES_FRESH_LOAD_H
#define FOUNDRYD_HOOK_MODULES_FRESH_LOAD_H

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "modules/globals.h"
#include "support/cuda.h"

namespace foundryd::modules {

class FreshLoad {
 public:
  FreshLoad(fdy_module_api api, std::span<const std::byte> image);
  ~FreshLoad();
  FreshLoad(const FreshLoad &) = delete;
  FreshLoad &operator=(const FreshLoad &) = delete;

  std::optional<Global> global(const std::string &name) const { return resolve_global(api_, handle_, name); }
  CUfunction function(const std::string &name) const;  // nullptr if there is none

 private:
  fdy_module_api api_;
  void *handle_;
};

}  // namespace foundryd::modules

#endif  // FOUNDRYD_HOOK_MODULES_FRESH_LOAD_H
