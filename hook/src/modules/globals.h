// SPDX-License-Identifier: Apache-2.0
//
// A module's writable globals: where they are, and which of them differ from what the image initialises them to.
#ifndef FOUNDRYD_HOOK_MODULES_GLOBALS_H
#define FOUNDRYD_HOOK_MODULES_GLOBALS_H

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "foundryd/hook.h"
#include "modules/registry.h"

namespace foundryd::modules {

struct Global {
  std::string name;
  CUdeviceptr address;
  size_t bytes;
};

// Nothing if the module or library at `handle` has no such global.
std::optional<Global> resolve_global(fdy_module_api api, void *handle, const std::string &name);

std::vector<std::byte> bytes_of(const Global &global);

// Throws Error NOT_FOUND if the module has no such global.
Global find_global(const Instance &instance, const char *name);

// Those of `names`, and of what the program asked for, that the driver finds in the module.
void fill_globals(uint32_t module, std::set<std::string> names, bool changed_only, fdy_buffer *globals,
                  fdy_buffer *strings);

}  // namespace foundryd::modules

#endif  // FOUNDRYD_HOOK_MODULES_GLOBALS_H
