// SPDX-License-Identifier: Apache-2.0
#include "modules/globals.h"

#include <optional>
#include <set>
#include <vector>

#include "graphs/capture_mode.h"
#include "modules/fresh_load.h"
#include "modules/strings.h"
#include "support/captures.h"
#include "support/driver.h"
#include "support/error.h"

namespace foundryd::modules {
namespace {

std::vector<Global> only_changed(const Instance &instance, const std::vector<Global> &globals) {
  if (globals.empty()) return {};
  if (!instance.image)
    throw Error(FDY_ERROR_STATE, "the image of module %u was not kept, so its globals cannot be compared: %s",
                instance.id,
                instance.communication ? "modules of communication libraries are never archived"
                                       : "images are kept under FOUNDRYD_MODE=capture");
  if (captures::any())
    throw Error(FDY_ERROR_STATE,
                "the globals of module %u cannot be read while a stream is being captured: end the "
                "capture first",
                instance.id);
  FDY_CU(cuCtxSynchronize);
  const FreshLoad fresh(instance.api, instance.image->bytes);
  std::vector<Global> out;
  for (const Global &global : globals) {
    const std::optional<Global> start = fresh.global(global.name);
    if (!start || start->bytes != global.bytes)
      throw Error(FDY_ERROR_UNSUPPORTED,
                  "global %s of module %u is not in a fresh load of the same image with the same "
                  "%zu bytes: the image cannot be archived",
                  global.name.c_str(), instance.id, global.bytes);
    if (bytes_of(global) != bytes_of(*start)) out.push_back(global);
  }
  return out;
}

}  // namespace

std::optional<Global> resolve_global(fdy_module_api api, void *handle, const std::string &name) {
  Global out{name, 0, 0};
  const CUresult code =
      api == FDY_LIBRARY_LOAD_DATA
          ? FDY_CU_RESULT(cuLibraryGetGlobal, &out.address, &out.bytes, static_cast<CUlibrary>(handle), name.c_str())
          : FDY_CU_RESULT(cuModuleGetGlobal_v2, &out.address, &out.bytes, static_cast<CUmodule>(handle), name.c_str());
  if (code == CUDA_ERROR_NOT_FOUND) return std::nullopt;
  driver::check(code, api == FDY_LIBRARY_LOAD_DATA ? "cuLibraryGetGlobal" : "cuModuleGetGlobal_v2");
  return out;
}

std::vector<std::byte> bytes_of(const Global &global) {
  std::vector<std::byte> out(global.bytes);
  if (global.bytes != 0) FDY_CU(cuMemcpyDtoH_v2, out.data(), global.address, global.bytes);
  return out;
}

Global find_global(const Instance &instance, const char *name) {
  if (!instance.live) throw Error(FDY_ERROR_STATE, "module %u was unloaded: it has no globals any more", instance.id);
  std::optional<Global> found = resolve_global(instance.api, instance.handle, name);
  if (!found)
    throw Error(FDY_ERROR_NOT_FOUND, "module %u has no global named %.200s: the image is not the recorded one",
                instance.id, name);
  return *found;
}

void fill_globals(uint32_t module, std::set<std::string> names, bool changed_only, fdy_buffer *globals,
                  fdy_buffer *strings) {
  const Instance instance = Registry::get().copy(module);
  if (!instance.live) throw Error(FDY_ERROR_STATE, "module %u was unloaded: it has no globals any more", module);
  const graphs::RelaxedCapture relaxed;
  names.insert(instance.asked_globals.begin(), instance.asked_globals.end());
  std::vector<Global> found;
  for (const std::string &name : names)
    if (const auto global = resolve_global(instance.api, instance.handle, name)) found.push_back(*global);
  if (changed_only) found = only_changed(instance, found);
  std::vector<fdy_global> rows;
  Strings text;
  for (const Global &g : found) rows.push_back({module, text.add(g.name), g.address, g.bytes});
  fill_buffers(std::pair{globals, &rows}, std::pair{strings, &text.block()});
}

}  // namespace foundryd::modules
