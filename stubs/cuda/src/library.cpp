// SPDX-License-Identifier: Apache-2.0
//
// Libraries: images without a context, which become a module in each context that uses them.
#include <algorithm>

#include "capture.h"
#include "context.h"
#include "module.h"

namespace softcuda {

namespace {

using KernelHandles = Handles<Kernel, CUkernel>;
using LibraryHandles = Handles<Library, CUlibrary>;

// `read` gives the image; an image that is none is kept for later.
template <class Read>
void load_library(CUlibrary *out, Read read) {
  require(out != nullptr);
  std::shared_ptr<const Image> image;
  std::shared_ptr<Instance> instance;
  CUresult defect = CUDA_SUCCESS;
  try {
    image = read();
    instance = std::make_shared<Instance>(*image);
  } catch (const Failure &failure) {
    if (failure.code != CUDA_ERROR_INVALID_IMAGE) throw;
    defect = failure.code;
  }
  const Lock lock = lock_process();
  const auto library = process().libraries.make();
  library->defect = defect;
  library->image = std::move(image);
  library->instance = std::move(instance);
  ++counters().module_loads;
  *out = LibraryHandles::handle(library);
  if (defect != CUDA_SUCCESS) return;
  const auto kernels = library->instance->kernels();
  for (size_t i = 0; i < kernels.size(); ++i) {
    const auto kernel = process().kernels.make();
    kernel->library = library;
    kernel->index = i;
    kernel->name = kernels[i]->name;
    library->kernels.push_back(kernel);
  }
}

// A library to look into.
std::shared_ptr<Library> library_at(CUlibrary handle) {
  auto library = process().libraries.get(handle);
  require(library->defect == CUDA_SUCCESS, library->defect);
  return library;
}

const KernelEntry &entry_of(const Kernel &kernel) {
  const auto library = kernel.library.lock();
  require(library != nullptr, CUDA_ERROR_INVALID_HANDLE);
  return *library->instance->kernels()[kernel.index];
}

}  // namespace

std::shared_ptr<Module> module_of(const std::shared_ptr<Library> &library) {
  const auto context = current_context();
  auto &slot = library->modules[context->id];
  if (slot == nullptr) {
    // The first context takes the instance that is there; every other gets variables of its own.
    auto instance = library->instance_taken ? std::make_shared<Instance>(*library->image) : library->instance;
    library->instance_taken = true;
    slot = make_module(context, library->image, std::move(instance));
    slot->library = library;
    for (const auto &kernel : library->kernels) {
      slot->functions[kernel->index]->settings = kernel->settings;
      slot->functions[kernel->index]->kernel = kernel;
    }
  }
  return slot;
}

std::shared_ptr<Function> function_of(Kernel &kernel) {
  const auto library = kernel.library.lock();
  require(library != nullptr, CUDA_ERROR_INVALID_HANDLE);
  return module_of(library)->functions[kernel.index];
}

std::shared_ptr<Function> callee_at(CUfunction handle) {
  if (auto function = process().functions.find(handle)) return function;
  return function_of(*process().kernels.get(reinterpret_cast<CUkernel>(handle)));
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *, void **,
                               unsigned int numJitOptions, CUlibraryOption *, void **, unsigned int numLibraryOptions) {
  return call([&] {
    require(numJitOptions <= 64 && numLibraryOptions <= CU_LIBRARY_NUM_OPTIONS);
    load_library(library, [&] { return read_image(code); });
  });
}

SOFTCUDA_API cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *, void **, unsigned int,
                                   CUlibraryOption *, void **, unsigned int) {
  return call([&] { load_library(library, [&] { return read_image_file(fileName); }); });
}

SOFTCUDA_API cuLibraryUnload(CUlibrary library) {
  return call([&] {
    std::shared_ptr<Library> found;
    std::vector<Mark> marks;
    {
      const Lock lock = lock_process();
      refuse_under_capture();
      found = process().libraries.get(library);
      for (const auto &[id, module] : found->modules) {
        if (const auto context = module->context.lock(); context != nullptr && context->active) {
          const auto more = pending_work(*context);
          marks.insert(marks.end(), more.begin(), more.end());
        }
      }
    }
    wait_all(marks);
    const Lock lock = lock_process();
    require(process().libraries.remove(found.get()) != nullptr, CUDA_ERROR_INVALID_HANDLE);
    const auto modules = found->modules;
    for (const auto &[id, module] : modules) {
      if (const auto context = module->context.lock()) context->modules.erase(module);
      forget_module(module);
    }
    for (const auto &kernel : found->kernels) process().kernels.remove(kernel.get());
    found->kernels.clear();
  });
}

SOFTCUDA_API cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name) {
  return locked_call([&] {
    require(pKernel != nullptr && name != nullptr);
    const auto found = library_at(library);
    const auto it = std::find_if(found->kernels.begin(), found->kernels.end(),
                                 [&](const auto &kernel) { return kernel->name == name; });
    require(it != found->kernels.end(), CUDA_ERROR_NOT_FOUND);
    *pKernel = KernelHandles::handle(*it);
  });
}

SOFTCUDA_API cuLibraryGetKernelCount(unsigned int *count, CUlibrary lib) {
  return locked_call([&] {
    require(count != nullptr);
    *count = static_cast<unsigned>(library_at(lib)->kernels.size());
  });
}

SOFTCUDA_API cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int numKernels, CUlibrary lib) {
  return locked_call([&] {
    require(kernels != nullptr);
    const auto library = library_at(lib);
    const size_t count = std::min<size_t>(numKernels, library->kernels.size());
    for (size_t i = 0; i < count; ++i) kernels[i] = KernelHandles::handle(library->kernels[i]);
  });
}

SOFTCUDA_API cuLibraryGetModule(CUmodule *pMod, CUlibrary library) {
  return locked_call([&] {
    require(pMod != nullptr);
    *pMod = Handles<Module, CUmodule>::handle(module_of(library_at(library)));
  });
}

SOFTCUDA_API cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name) {
  return locked_call([&] {
    require(name != nullptr);
    const auto module = module_of(library_at(library));
    const auto &globals = module->image->globals;
    const auto it =
        std::find_if(globals.begin(), globals.end(), [&](const ImageGlobal &global) { return global.name == name; });
    require(it != globals.end(), CUDA_ERROR_NOT_FOUND);
    if (dptr != nullptr) *dptr = module->instance->base() + it->offset;
    if (bytes != nullptr) *bytes = it->bytes;
  });
}

SOFTCUDA_API cuLibraryGetManaged(CUdeviceptr *, size_t *, CUlibrary library, const char *) {
  return locked_call([&] {
    library_at(library);
    throw Failure{CUDA_ERROR_NOT_FOUND};
  });
}

SOFTCUDA_API cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel) {
  return call([&] {
    Lock lock = lock_process();
    require(pFunc != nullptr);
    const auto function = function_of(*process().kernels.get(kernel));
    ensure_loaded(lock, function);
    *pFunc = Handles<Function, CUfunction>::handle(function);
  });
}

SOFTCUDA_API cuKernelGetLibrary(CUlibrary *pLib, CUkernel kernel) {
  return locked_call([&] {
    require(pLib != nullptr);
    *pLib = LibraryHandles::handle(process().kernels.get(kernel)->library.lock());
  });
}

SOFTCUDA_API cuKernelGetName(const char **name, CUkernel hfunc) {
  return locked_call([&] {
    require(name != nullptr);
    *name = process().kernels.get(hfunc)->name.c_str();
  });
}

SOFTCUDA_API cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t *paramOffset, size_t *paramSize) {
  return locked_call(
      [&] { parameter_info(entry_of(*process().kernels.get(kernel)), paramIndex, paramOffset, paramSize); });
}

SOFTCUDA_API cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev) {
  return locked_call([&] {
    require(pi != nullptr);
    device_at(dev);
    const auto found = process().kernels.get(kernel);
    *pi = function_attribute(entry_of(*found), found->settings, attrib);
  });
}

SOFTCUDA_API cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev) {
  return locked_call([&] {
    device_at(dev);
    const auto found = process().kernels.get(kernel);
    set_function_attribute(found->settings, attrib, val);
    const auto library = found->library.lock();
    for (const auto &[id, module] : library->modules) {
      set_function_attribute(module->functions[found->index]->settings, attrib, val);
    }
  });
}

SOFTCUDA_API cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache, CUdevice dev) {
  return locked_call([&] {
    device_at(dev);
    process().kernels.get(kernel);
  });
}
