// SPDX-License-Identifier: Apache-2.0
#include "api.h"

#include <dlfcn.h>

namespace foundryd::bindings {
namespace {

const char *error_type(int32_t status) {
  switch (status) {
    case FDY_ERROR_DRIVER:
    case FDY_ERROR_NCCL:
      return "DriverCallFailed";
    case FDY_ERROR_INVALID:
    case FDY_ERROR_STATE:
      return "UsageError";
    case FDY_ERROR_DIVERGED:
      return "LayoutDiverged";
    case FDY_ERROR_UNSUPPORTED:
      return "UnsupportedNode";
    default:
      return "RestoreError";
  }
}

py::object make(const char *type, const std::string &message) {
  return py::module_::import("foundryd.errors").attr(type)(message);
}

[[noreturn]] void throw_object(const py::object &error) {
  PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace

const fdy_hook *find_hook() {
  static const fdy_hook *const hook = []() -> const fdy_hook * {
    const auto api = reinterpret_cast<fdy_hook_api_fn>(dlsym(RTLD_DEFAULT, "fdy_hook_api"));
    const fdy_hook *found = api == nullptr ? nullptr : api(FDY_HOOK_ABI);
    return found != nullptr && found->abi == FDY_HOOK_ABI && found->bytes >= sizeof(fdy_hook) ? found : nullptr;
  }();
  return hook;
}

void raise(const char *type, const std::string &message) {
  throw_object(make(type, message));
}

void raise_last(const fdy_hook &hook) {
  fdy_error error{};
  hook.last_error(&error);
  const py::object exception = make(error_type(error.status), error.message);
  exception.attr("status") = error.status;
  exception.attr("code") = error.code;
  exception.attr("call") = py::str(error.call);
  throw_object(exception);
}

Hook::Hook() : hook_(find_hook()) {
  if (hook_ == nullptr)
    raise("HookMissing",
          "libfoundryd_hook.so with interface version " + std::to_string(FDY_HOOK_ABI) +
              " is not in this process: start it with `foundryd run` or put the library first in LD_PRELOAD");
}

}  // namespace foundryd::bindings
