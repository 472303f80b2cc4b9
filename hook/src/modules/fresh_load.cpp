// SPDX-License-Identifier: Apache-2.0
#include "modules/fresh_load.h"

#include "modules/load.h"
#include "support/driver.h"

namespace foundryd::modules {

FreshLoad::FreshLoad(fdy_module_api api, std::span<const std::byte> image)
    : api_(api), handle_(load_image(api, image)) {}

FreshLoad::~FreshLoad() {
  unload_image(api_, handle_);
}

CUfunction FreshLoad::function(const std::string &name) const {
  return resolve_function(api_, handle_, name.c_str()).function;
}

}  // namespace foundryd::modules
