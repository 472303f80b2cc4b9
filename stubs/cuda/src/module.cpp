// SPDX-License-Identifier: Apache-2.0
#include "module.h"

#include <algorithm>

#include "capture.h"
#include "context.h"
#include "memory.h"

namespace softcuda {

namespace {

using ModuleHandles = Handles<Module, CUmodule>;
using FunctionHandles = Handles<Function, CUfunction>;

void register_globals(const Module &module, const std::shared_ptr<Context> &context) {
  for (const ImageGlobal &global : module.image->globals) {
    if (global.bytes == 0) continue;
    Range range;
    range.base = module.instance->base() + global.offset;
    range.bytes = global.bytes;
    range.kind = Kind::Global;
    range.device = context->device;
    range.context = context;
    range.mapping = range.base;
    range.mapping_bytes = range.bytes;
    ranges().add(std::move(range));
  }
}

// Loading for real waits for the context, and holds up launches meanwhile.
void wait_for_context(Lock &lock, Context &context) {
  const auto marks = pending_work(context);
  if (marks.empty()) return;
  ++context.loading;
  lock.unlock();
  wait_all(marks);
  lock.lock();
  --context.loading;
  context.loaded.notify_all();
}

void load_module(CUmodule *out, const std::shared_ptr<const Image> &image) {
  require(out != nullptr);
  auto instance = std::make_shared<Instance>(*image);
  Lock lock = lock_process();
  const auto context = current_context();
  wait_for_context(lock, *context);
  const auto module = make_module(context, image, std::move(instance));
  module->resident = true;
  ++counters().module_loads;
  *out = ModuleHandles::handle(module);
}

void load_checked(CUmodule *out, const void *image) {
  {
    const Lock lock = lock_process();
    current_context();
  }
  load_module(out, read_image(image));
}

}  // namespace

std::shared_ptr<Module> make_module(const std::shared_ptr<Context> &context, std::shared_ptr<const Image> image,
                                    std::shared_ptr<Instance> instance) {
  auto module = process().modules.make();
  module->context = context;
  module->image = std::move(image);
  module->instance = std::move(instance);
  for (const KernelEntry *entry : module->instance->kernels()) {
    const auto function = process().functions.make();
    function->module = module;
    function->instance = module->instance;
    function->entry = entry;
    function->name = entry->name;
    function->loaded = process().settings.eager_loading;
    module->functions.push_back(function);
  }
  register_globals(*module, context);
  context->modules.insert(module);
  return module;
}

void forget_module(const std::shared_ptr<Module> &module) {
  for (const ImageGlobal &global : module->image->globals) {
    ranges().remove(module->instance->base() + global.offset);
  }
  for (const auto &function : module->functions) process().functions.remove(function.get());
  module->functions.clear();
  if (const auto library = module->library.lock()) {
    if (const auto context = module->context.lock()) library->modules.erase(context->id);
  }
  process().modules.remove(module.get());
}

void ensure_loaded(Lock &lock, const std::shared_ptr<Function> &function) {
  if (function->loaded) return;
  const auto module = function->module.lock();
  require(module != nullptr, CUDA_ERROR_INVALID_HANDLE);
  const auto context = module->context.lock();
  require(context != nullptr && context->active, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  if (!module->resident) wait_for_context(lock, *context);
  module->resident = true;
  function->loaded = true;
}

void wait_for_loading(Lock &lock, const std::shared_ptr<Context> &context) {
  context->loaded.wait(lock, [&] { return context->loading == 0; });
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuModuleLoad(CUmodule *module, const char *fname) {
  return call([&] { load_module(module, read_image_file(fname)); });
}

SOFTCUDA_API cuModuleLoadData(CUmodule *module, const void *image) {
  return call([&] { load_checked(module, image); });
}

SOFTCUDA_API cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options,
                                void **optionValues) {
  return call([&] {
    require(numOptions == 0 || (options != nullptr && optionValues != nullptr));
    load_checked(module, image);
  });
}

SOFTCUDA_API cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin) {
  return call([&] { load_checked(module, fatCubin); });
}

SOFTCUDA_API cuModuleUnload(CUmodule hmod) {
  return call([&] {
    std::shared_ptr<Module> module;
    std::vector<Mark> marks;
    {
      const Lock lock = lock_process();
      current_context();
      refuse_under_capture();
      module = process().modules.get(hmod);
      require(module->library.expired(), CUDA_ERROR_NOT_PERMITTED);
      if (const auto context = module->context.lock()) marks = pending_work(*context);
    }
    wait_all(marks);
    const Lock lock = lock_process();
    require(process().modules.find(hmod) == module, CUDA_ERROR_INVALID_HANDLE);
    if (const auto context = module->context.lock()) context->modules.erase(module);
    forget_module(module);
  });
}

SOFTCUDA_API cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
  return locked_call([&] {
    require(mode != nullptr);
    *mode = process().settings.eager_loading ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
  });
}

SOFTCUDA_API cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
  return call([&] {
    Lock lock = lock_process();
    require(hfunc != nullptr && name != nullptr);
    const auto module = process().modules.get(hmod);
    const auto it = std::find_if(module->functions.begin(), module->functions.end(),
                                 [&](const auto &function) { return function->name == name; });
    require(it != module->functions.end(), CUDA_ERROR_NOT_FOUND);
    const auto function = *it;
    ensure_loaded(lock, function);
    *hfunc = FunctionHandles::handle(function);
  });
}

SOFTCUDA_API cuModuleGetFunctionCount(unsigned int *count, CUmodule mod) {
  return locked_call([&] {
    require(count != nullptr);
    *count = static_cast<unsigned>(process().modules.get(mod)->functions.size());
  });
}

SOFTCUDA_API cuModuleEnumerateFunctions(CUfunction *functions, unsigned int numFunctions, CUmodule mod) {
  return locked_call([&] {
    require(functions != nullptr);
    const auto module = process().modules.get(mod);
    const size_t count = std::min<size_t>(numFunctions, module->functions.size());
    for (size_t i = 0; i < count; ++i) functions[i] = FunctionHandles::handle(module->functions[i]);
  });
}

SOFTCUDA_API cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name) {
  return locked_call([&] {
    require(name != nullptr);
    const auto module = process().modules.get(hmod);
    const auto &globals = module->image->globals;
    const auto it =
        std::find_if(globals.begin(), globals.end(), [&](const ImageGlobal &global) { return global.name == name; });
    require(it != globals.end(), CUDA_ERROR_NOT_FOUND);
    if (dptr != nullptr) *dptr = module->instance->base() + it->offset;
    if (bytes != nullptr) *bytes = it->bytes;
  });
}
