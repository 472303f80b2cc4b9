// SPDX-License-Identifier: Apache-2.0
#include "modules/compare.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "graphs/capture_mode.h"
#include "modules/fresh_load.h"
#include "modules/functions.h"
#include "modules/globals.h"
#include "modules/image.h"
#include "modules/registry.h"
#include "support/captures.h"
#include "support/driver.h"
#include "support/error.h"

namespace foundryd::modules {
namespace {

constexpr std::pair<CUfunction_attribute, const char *> kAttributes[] = {
    {CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, "threads a block"},
    {CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, "bytes of shared memory"},
    {CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, "bytes of constant memory"},
    {CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, "bytes of local memory"},
    {CU_FUNC_ATTRIBUTE_NUM_REGS, "registers"},
    {CU_FUNC_ATTRIBUTE_PTX_VERSION, "as its PTX version"},
    {CU_FUNC_ATTRIBUTE_BINARY_VERSION, "as its binary version"},
    {CU_FUNC_ATTRIBUTE_CACHE_MODE_CA, "as its cache mode"},
    {CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, "bytes of dynamic shared memory"},
    {CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, "as its shared memory carveout"},
    {CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET, "as whether its cluster must be set"},
    {CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, "as its cluster's width"},
    {CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT, "as its cluster's height"},
    {CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH, "as its cluster's depth"},
    {CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, "as whether its cluster may be large"},
    {CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, "as its cluster's policy"},
};

// Nothing where the driver does not know the attribute.
std::optional<int> attribute(CUfunction function, CUfunction_attribute which) {
  int value = 0;
  const CUresult code = FDY_CU_RESULT(cuFuncGetAttribute, &value, which, function);
  if (code == CUDA_ERROR_INVALID_VALUE) return std::nullopt;
  driver::check(code, "cuFuncGetAttribute");
  return value;
}

std::string text(std::optional<int> value) {
  return value ? std::to_string(*value) : "nothing";
}

struct SeenFunction {
  std::vector<std::optional<int>> attributes;  // as kAttributes lists them
  ParamLayout params;
};

// What a load of an image has of the names that are asked for.
struct Seen {
  std::map<std::string, SeenFunction> functions;
  std::map<std::string, std::vector<std::byte>> globals;
};

Seen look(fdy_module_api api, std::span<const std::byte> image, const std::set<std::string> &functions,
          const std::set<std::string> &globals) {
  const FreshLoad load(api, image);
  Seen out;
  for (const std::string &name : functions) {
    const CUfunction function = load.function(name);
    if (function == nullptr) continue;
    SeenFunction &seen = out.functions[name];
    for (const auto &[which, _] : kAttributes) seen.attributes.push_back(attribute(function, which));
    seen.params = param_layout(function, nullptr);
  }
  for (const std::string &name : globals)
    if (const auto global = load.global(name)) out.globals[name] = bytes_of(*global);
  return out;
}

std::string function_difference(const std::string &name, const SeenFunction &theirs, const SeenFunction &ours) {
  for (size_t i = 0; i < std::size(kAttributes); ++i) {
    const auto now = ours.attributes[i], before = theirs.attributes[i];
    if (now != before) return "gives " + name + ' ' + text(now) + ' ' + kAttributes[i].second + ", not " + text(before);
  }
  const auto &now = ours.params, &before = theirs.params;
  const auto same = [](const fdy_field &a, const fdy_field &b) { return a.offset == b.offset && a.bytes == b.bytes; };
  if (std::ranges::equal(now.fields, before.fields, same)) return {};
  return "gives " + name + ' ' + std::to_string(now.fields.size()) + " parameters in " + std::to_string(now.bytes) +
         " bytes, not the same " + std::to_string(before.fields.size()) + " in " + std::to_string(before.bytes);
}

std::string global_difference(const std::string &name, const std::vector<std::byte> &live,
                              const std::vector<std::byte> &theirs, const std::vector<std::byte> &ours) {
  if (ours.size() != theirs.size())
    return "gives the global " + name + ' ' + std::to_string(ours.size()) + " bytes, not " +
           std::to_string(theirs.size());
  // One that the program changed is archived, and may hold the address of another.
  return live == theirs && ours != theirs ? "starts the global " + name + " otherwise" : std::string();
}

}  // namespace

std::string image_difference(uint32_t module, std::span<const std::byte> image, const std::set<std::string> &functions,
                             const std::set<std::string> &globals) {
  const Instance instance = Registry::get().copy(module);
  if (!instance.live || !instance.image || captures::any())
    throw Error(FDY_ERROR_STATE,
                "module %u cannot be compared with another image: it has to be loaded, its image kept "
                "(FOUNDRYD_MODE=capture) and no stream captured",
                module);
  if (measure_exactly(image).bytes == 0) return "is not one image";
  const graphs::RelaxedCapture relaxed;
  FDY_CU(cuCtxSynchronize);
  std::set<std::string> names = globals;
  names.insert(instance.asked_globals.begin(), instance.asked_globals.end());
  const Seen theirs = look(instance.api, instance.image->bytes, functions, names);
  Seen ours;
  try {
    ours = look(instance.api, image, functions, names);
  } catch (const Error &error) {
    if (error.status() != FDY_ERROR_DRIVER) throw;
    return std::string("is not loaded: ") + error.what();
  }
  for (const std::string &name : functions) {
    if (!theirs.functions.contains(name))
      throw Error(FDY_ERROR_UNSUPPORTED,
                  "function %.200s of module %u is not in a fresh load of the same image: the image cannot be archived",
                  name.c_str(), module);
    if (!ours.functions.contains(name)) return "has no function " + name;
    if (auto found = function_difference(name, theirs.functions.at(name), ours.functions.at(name)); !found.empty())
      return found;
  }
  for (const auto &[name, start] : theirs.globals) {
    const auto live = resolve_global(instance.api, instance.handle, name);
    if (!live) continue;
    if (!ours.globals.contains(name)) return "has no global " + name;
    if (auto found = global_difference(name, bytes_of(*live), start, ours.globals.at(name)); !found.empty())
      return found;
  }
  return {};
}

}  // namespace foundryd::modules
