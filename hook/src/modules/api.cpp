// SPDX-License-Identifier: Apache-2.0
//
// The part of the fdy_hook table that is about modules.
#include <set>
#include <string>

#include "interpose/concepts.h"
#include "modules/compare.h"
#include "modules/functions.h"
#include "modules/globals.h"
#include "modules/load.h"
#include "modules/registry.h"
#include "support/buffer.h"
#include "support/error.h"

namespace foundryd::modules {
namespace {

void require(bool condition, const char *what) {
  if (!condition) throw Error(FDY_ERROR_INVALID, "%s is NULL: pass one", what);
}

int api_modules(fdy_buffer *out) {
  return guard_api([&] {
    require(out != nullptr, "the buffer");
    fill_buffer(out, Registry::get().list());
  });
}

int api_module_image(uint32_t module, fdy_buffer *out) {
  return guard_api([&] {
    require(out != nullptr, "the buffer");
    const Instance instance = Registry::get().copy(module);
    if (!instance.refusal.empty())
      throw Error(FDY_ERROR_UNSUPPORTED, "module %u cannot be archived because %s", module, instance.refusal.c_str());
    if (!instance.image)
      throw Error(FDY_ERROR_STATE,
                  "the image of module %u was not kept: images are kept under FOUNDRYD_MODE=capture, "
                  "those of communication libraries never",
                  module);
    fill_buffer(out, instance.image->bytes);
  });
}

int api_functions(fdy_buffer *functions, fdy_buffer *fields, fdy_buffer *settings, fdy_buffer *strings) {
  return guard_api([&] {
    require(functions && fields && settings && strings, "a buffer");
    fill_functions(functions, fields, settings, strings);
  });
}

std::set<std::string> listed(const char *const *names, uint64_t count) {
  require(names || count == 0, "the list of names");
  std::set<std::string> out;
  for (uint64_t i = 0; i < count; ++i) {
    require(names[i], "a name");
    out.insert(names[i]);
  }
  return out;
}

int api_changed_globals(uint32_t module, const char *const *names, uint64_t count, fdy_buffer *globals,
                        fdy_buffer *strings) {
  return guard_api([&] {
    require(globals && strings, "a buffer");
    fill_globals(module, listed(names, count), true, globals, strings);
  });
}

int api_module_globals(uint32_t module, const char *const *names, uint64_t count, fdy_buffer *globals,
                       fdy_buffer *strings) {
  return guard_api([&] {
    require(globals && strings, "a buffer");
    fill_globals(module, listed(names, count), false, globals, strings);
  });
}

int api_image_difference(uint32_t module, const void *image, uint64_t bytes, const char *const *functions,
                         uint64_t function_count, const char *const *globals, uint64_t global_count, fdy_buffer *out) {
  return guard_api([&] {
    require(image && out, "the image or the buffer");
    fill_buffer(out, image_difference(module, {static_cast<const std::byte *>(image), bytes},
                                      listed(functions, function_count), listed(globals, global_count)));
  });
}

int api_load_module(uint32_t api, const void *image, uint64_t bytes, uint32_t *module) {
  return guard_api([&] {
    require(image && module, "the image or the result");
    *module = load_module(api, {static_cast<const std::byte *>(image), bytes});
  });
}

int api_global_address(uint32_t module, const char *name, uint64_t *address, uint64_t *bytes) {
  return guard_api([&] {
    require(name && address && bytes, "the name or a result");
    const Global found = find_global(Registry::get().copy(module), name);
    *address = found.address;
    *bytes = found.bytes;
  });
}

int api_load_function(uint32_t module, const char *name, const fdy_setting *settings, uint64_t count,
                      uint64_t *function) {
  return guard_api([&] {
    require(name && function && (settings || count == 0), "the name, the settings or the result");
    *function = reinterpret_cast<uintptr_t>(load_function(module, name, {settings, count}));
  });
}

}  // namespace

void fill(fdy_hook &table) {
  table.modules = api_modules;
  table.module_image = api_module_image;
  table.functions = api_functions;
  table.changed_globals = api_changed_globals;
  table.module_globals = api_module_globals;
  table.image_difference = api_image_difference;
  table.load_module = api_load_module;
  table.global_address = api_global_address;
  table.load_function = api_load_function;
}

}  // namespace foundryd::modules
