// SPDX-License-Identifier: Apache-2.0
//
// Loading what an archive holds: images, functions with their settings.
#ifndef FOUNDRYD_HOOK_MODULES_LOAD_H
#define FOUNDRYD_HOOK_MODULES_LOAD_H

#include <cstddef>
#include <cstdint>
#include <span>

#include "foundryd/hook.h"
#include "support/cuda.h"

namespace foundryd::modules {

// Through the API that the program used; the handle is a CUmodule or a CUlibrary.  Not noted in the registry.
void *load_image(fdy_module_api api, std::span<const std::byte> image);
void unload_image(fdy_module_api api, void *handle) noexcept;

struct Resolved {
  CUfunction function = nullptr;  // nullptr if the module has none of that name
  CUkernel kernel = nullptr;      // of a library
};

Resolved resolve_function(fdy_module_api api, void *handle, const char *name);

// Loads an image from outside, which must be exactly one container, and notes it; its instance id.
uint32_t load_module(uint32_t api, std::span<const std::byte> image);

// Finds a function, applies `settings` and loads it in full.
CUfunction load_function(uint32_t module, const char *name, std::span<const fdy_setting> settings);

}  // namespace foundryd::modules

#endif  // FOUNDRYD_HOOK_MODULES_LOAD_H
