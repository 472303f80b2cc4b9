// SPDX-License-Identifier: Apache-2.0
#ifndef SOFTCUDA_MODULE_H
#define SOFTCUDA_MODULE_H

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "image.h"
#include "process.h"

namespace softcuda {

// Attributes that a program can set on a function or kernel.
using FunctionSettings = std::map<CUfunction_attribute, int>;

struct Function {
  std::weak_ptr<Module> module;
  std::weak_ptr<Kernel> kernel;        // of a function that belongs to a library
  std::shared_ptr<Instance> instance;  // keeps the code while a graph or a queue refers to it
  const KernelEntry *entry = nullptr;
  std::string name;
  FunctionSettings settings;
  bool loaded = false;
};

// One image in one context.
struct Module {
  std::weak_ptr<Context> context;
  std::weak_ptr<Library> library;  // of a module that a library made
  std::shared_ptr<const Image> image;
  std::shared_ptr<Instance> instance;
  std::vector<std::shared_ptr<Function>> functions;
  bool resident = false;  // in the context; a library's is when the first of its functions is asked for
};

struct Kernel {
  std::weak_ptr<Library> library;
  size_t index = 0;
  std::string name;
  FunctionSettings settings;
};

// Loading a library does not read its image: one that is none shows when something in it is asked for.
struct Library {
  CUresult defect = CUDA_SUCCESS;
  std::shared_ptr<const Image> image;
  std::shared_ptr<Instance> instance;  // what describes the kernels; becomes the first module
  bool instance_taken = false;
  std::vector<std::shared_ptr<Kernel>> kernels;
  std::map<uint64_t, std::shared_ptr<Module>> modules;  // by context id
};

// Makes an instance of an image in a context and registers its functions and variables.
std::shared_ptr<Module> make_module(const std::shared_ptr<Context> &context, std::shared_ptr<const Image> image,
                                    std::shared_ptr<Instance> instance);
void forget_module(const std::shared_ptr<Module> &module);

// The library's module in the current context, made when first needed.
std::shared_ptr<Module> module_of(const std::shared_ptr<Library> &library);
std::shared_ptr<Function> function_of(Kernel &kernel);

// Launches and the occupancy calls take a CUkernel, cast, where they ask for a function.  No other call does.
std::shared_ptr<Function> callee_at(CUfunction handle);

// A function's code is loaded when its handle is asked for, else with its first use.  Bringing a module into the
// context waits for all work of the context; loading a function of one that is there does not.
void ensure_loaded(Lock &lock, const std::shared_ptr<Function> &function);

// Launches wait while a module is brought into the context.
void wait_for_loading(Lock &lock, const std::shared_ptr<Context> &context);

int function_attribute(const KernelEntry &entry, const FunctionSettings &settings, CUfunction_attribute attribute);
void set_function_attribute(FunctionSettings &settings, CUfunction_attribute attribute, int value);
void parameter_info(const KernelEntry &entry, size_t index, size_t *offset, size_t *bytes);

}  // namespace softcuda

#endif  // SOFTCUDA_MODULE_H
