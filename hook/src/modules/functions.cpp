// SPDX-License-Identifier: Apache-2.0
#include "modules/functions.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "modules/registry.h"
#include "modules/strings.h"
#include "support/buffer.h"
#include "support/driver.h"
#include "support/error.h"

namespace foundryd::modules {
namespace {

class FunctionTable {
 public:
  static FunctionTable &get() {
    static auto *table = new FunctionTable;
    return *table;
  }

  // What is known of a handle stays true until some module is unloaded.
  bool cached(void *handle, uint64_t epoch, UsedFunction *out) {
    const std::lock_guard lock(mutex_);
    enter(epoch);
    const auto it = by_handle_.find(handle);
    if (it == by_handle_.end()) return false;
    *out = it->second;
    return true;
  }

  void cache(void *handle, uint64_t epoch, const UsedFunction &function) {
    const std::lock_guard lock(mutex_);
    if (epoch == epoch_) by_handle_.emplace(handle, function);
  }

  std::shared_ptr<const ParamLayout> layout(CUfunction function, uint64_t epoch) {
    const std::lock_guard lock(mutex_);
    enter(epoch);
    const auto it = layouts_.find(function);
    return it == layouts_.end() ? nullptr : it->second;
  }

  void keep(CUfunction function, uint64_t epoch, const std::shared_ptr<const ParamLayout> &layout) {
    const std::lock_guard lock(mutex_);
    enter(epoch);
    layouts_.insert_or_assign(function, layout);  // an older one is of a function that is gone
  }

  uint32_t use(const UsedFunction &function, uint32_t shared_bytes) {
    const std::lock_guard lock(mutex_);
    const auto [it, fresh] =
        places_.try_emplace({function.module, function.name}, static_cast<uint32_t>(functions_.size()));
    if (fresh) functions_.push_back(function);
    UsedFunction &used = functions_[it->second];
    used.shared_bytes = std::max(used.shared_bytes, shared_bytes);
    return it->second;
  }

  std::vector<UsedFunction> list() {
    const std::lock_guard lock(mutex_);
    return functions_;
  }

 private:
  void enter(uint64_t epoch) {
    if (epoch == epoch_) return;
    by_handle_.clear();
    layouts_.clear();
    epoch_ = epoch;
  }

  std::mutex mutex_;
  uint64_t epoch_ = 0;
  std::unordered_map<void *, UsedFunction> by_handle_;
  std::unordered_map<CUfunction, std::shared_ptr<const ParamLayout>> layouts_;
  std::map<std::pair<uint32_t, std::string>, uint32_t> places_;
  std::vector<UsedFunction> functions_;
};

}  // namespace

ParamLayout param_layout(CUfunction function, CUkernel kernel) {
  ParamLayout out;
  for (size_t i = 0;; ++i) {
    size_t offset = 0, bytes = 0;
    const CUresult code = kernel != nullptr ? FDY_CU_RESULT(cuKernelGetParamInfo, kernel, i, &offset, &bytes)
                                            : FDY_CU_RESULT(cuFuncGetParamInfo, function, i, &offset, &bytes);
    if (code == CUDA_ERROR_INVALID_VALUE) break;  // past the last one
    driver::check(code, kernel != nullptr ? "cuKernelGetParamInfo" : "cuFuncGetParamInfo");
    out.fields.push_back({static_cast<uint32_t>(offset), static_cast<uint32_t>(bytes)});
    out.bytes = std::max(out.bytes, static_cast<uint32_t>(offset + bytes));
  }
  return out;
}

void keep_layout(CUfunction function) {
  const uint64_t epoch = Registry::get().epoch();
  FunctionTable::get().keep(function, epoch, std::make_shared<const ParamLayout>(param_layout(function, nullptr)));
}

std::shared_ptr<const ParamLayout> known_layout(CUfunction function) {
  if (auto known = FunctionTable::get().layout(function, Registry::get().epoch())) return known;
  return std::make_shared<const ParamLayout>(param_layout(function, nullptr));
}

UsedFunction inspect_function(CUfunction function, CUkernel kernel) {
  Registry &registry = Registry::get();
  if (kernel == nullptr) kernel = registry.kernel_behind(function);
  const uint64_t epoch = registry.epoch();
  void *handle = kernel != nullptr ? static_cast<void *>(kernel) : static_cast<void *>(function);
  UsedFunction out;
  if (FunctionTable::get().cached(handle, epoch, &out)) return out;
  FunctionName name = registry.identify(function, kernel);
  const Instance instance = registry.copy(name.module);
  if (!instance.refusal.empty() && !instance.communication)
    throw Error(FDY_ERROR_UNSUPPORTED,
                "function %s is in module %u, which cannot be archived because %s: build it as one container without "
                "such options",
                name.name.c_str(), name.module, instance.refusal.c_str());
  out = {name.module, std::move(name.name), param_layout(function, kernel), 0};
  FunctionTable::get().cache(handle, epoch, out);
  return out;
}

uint32_t use_function(const UsedFunction &function, uint32_t shared_bytes) {
  return FunctionTable::get().use(function, shared_bytes);
}

void fill_functions(fdy_buffer *functions, fdy_buffer *fields, fdy_buffer *settings, fdy_buffer *strings) {
  std::vector<fdy_function> rows;
  std::vector<fdy_field> all_fields;
  std::vector<fdy_setting> all_settings;
  Strings text;
  for (const UsedFunction &f : FunctionTable::get().list()) {
    Settings set = Registry::get().settings({f.module, f.name});
    // A program may set it for each launch anew, and the last may be a small one; nodes of all of them are built with
    // one.
    if (const auto limit = set.find(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES); limit != set.end())
      limit->second = std::max(limit->second, static_cast<int32_t>(f.shared_bytes));
    rows.push_back({f.module, text.add(f.name), static_cast<uint32_t>(f.params.fields.size()), f.params.bytes,
                    static_cast<uint32_t>(all_fields.size()), static_cast<uint32_t>(all_settings.size()),
                    static_cast<uint32_t>(set.size()), 0});
    all_fields.insert(all_fields.end(), f.params.fields.begin(), f.params.fields.end());
    for (const auto &[attribute, value] : set) all_settings.push_back({attribute, value});
  }
  fill_buffers(std::pair{functions, &rows}, std::pair{fields, &all_fields}, std::pair{settings, &all_settings},
               std::pair{strings, &text.block()});
}

}  // namespace foundryd::modules
