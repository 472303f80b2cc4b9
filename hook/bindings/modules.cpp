// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "arrays.h"

namespace foundryd::bindings {
namespace {

py::array_t<fdy_module> modules(const Hook &hook) {
  Buffer buffer(hook);
  hook.call(hook->modules, buffer.out());
  return copy_array<fdy_module>(buffer);
}

py::bytes module_image(const Hook &hook, uint32_t module) {
  Buffer buffer(hook);
  hook.call(hook->module_image, module, buffer.out());
  return py::bytes(static_cast<const char *>(buffer.data()), buffer.bytes());
}

py::tuple functions(const Hook &hook) {
  Buffer functions(hook), fields(hook), settings(hook), strings(hook);
  hook.call(hook->functions, functions.out(), fields.out(), settings.out(), strings.out());
  const auto table = copy_array<fdy_function>(functions);
  py::list names;
  for (py::ssize_t i = 0; i < table.size(); ++i) names.append(text_at(strings, table.data()[i].name));
  return py::make_tuple(table, copy_array<fdy_field>(fields), copy_array<fdy_setting>(settings), names);
}

std::vector<const char *> pointers(const std::vector<std::string> &names) {
  std::vector<const char *> out;
  out.reserve(names.size());
  for (const std::string &name : names) out.push_back(name.c_str());
  return out;
}

// The bytes of a contiguous buffer of Python.
class View {
 public:
  explicit View(const py::object &object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw py::error_already_set();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View &) = delete;
  View &operator=(const View &) = delete;
  const void *data() const { return view_.buf; }
  uint64_t bytes() const { return static_cast<uint64_t>(view_.len); }

 private:
  Py_buffer view_{};
};

template <class Entry>
py::tuple globals_of(const Hook &hook, Entry entry, uint32_t module, const std::vector<std::string> &listed) {
  const std::vector<const char *> wanted = pointers(listed);
  Buffer globals(hook), strings(hook);
  hook.call(entry, module, wanted.data(), static_cast<uint64_t>(wanted.size()), globals.out(), strings.out());
  const auto table = copy_array<fdy_global>(globals);
  py::list names;
  for (py::ssize_t i = 0; i < table.size(); ++i) names.append(text_at(strings, table.data()[i].name));
  return py::make_tuple(table, names);
}

uint32_t load_module(const Hook &hook, uint32_t api, const py::object &image) {
  const View view(image);
  uint32_t module = FDY_NONE;
  hook.call(hook->load_module, api, view.data(), view.bytes(), &module);
  return module;
}

py::str image_difference(const Hook &hook, uint32_t module, const py::object &image,
                         const std::vector<std::string> &functions, const std::vector<std::string> &globals) {
  const View view(image);
  const std::vector<const char *> used = pointers(functions), known = pointers(globals);
  Buffer out(hook);
  hook.call(hook->image_difference, module, view.data(), view.bytes(), used.data(), static_cast<uint64_t>(used.size()),
            known.data(), static_cast<uint64_t>(known.size()), out.out());
  return py::str(static_cast<const char *>(out.data()), out.bytes());
}

py::tuple global_address(const Hook &hook, uint32_t module, const std::string &name) {
  uint64_t address = 0, bytes = 0;
  hook.call(hook->global_address, module, name.c_str(), &address, &bytes);
  return py::make_tuple(address, bytes);
}

uint64_t load_function(const Hook &hook, uint32_t module, const std::string &name, const py::object &settings) {
  uint64_t function = 0;
  if (settings.is_none()) {
    hook.call(hook->load_function, module, name.c_str(), static_cast<const fdy_setting *>(nullptr), uint64_t{0},
              &function);
    return function;
  }
  const auto array = require<fdy_setting>(settings, "settings");
  hook.call(hook->load_function, module, name.c_str(), array.data(), static_cast<uint64_t>(array.size()), &function);
  return function;
}

}  // namespace

void define_modules(HookClass &hook) {
  hook.def("modules", &modules)
      .def("module_image", &module_image, py::arg("module"))
      .def("functions", &functions)
      .def(
          "changed_globals",
          [](const Hook &h, uint32_t module, const std::vector<std::string> &names) {
            return globals_of(h, h->changed_globals, module, names);
          },
          py::arg("module"), py::arg("names"))
      .def(
          "module_globals",
          [](const Hook &h, uint32_t module, const std::vector<std::string> &names) {
            return globals_of(h, h->module_globals, module, names);
          },
          py::arg("module"), py::arg("names"))
      .def("image_difference", &image_difference, py::arg("module"), py::arg("image"), py::arg("functions"),
           py::arg("globals"))
      .def("load_module", &load_module, py::arg("api"), py::arg("image"))
      .def("global_address", &global_address, py::arg("module"), py::arg("name"))
      .def("load_function", &load_function, py::arg("module"), py::arg("name"), py::arg("settings") = py::none());
}

}  // namespace foundryd::bindings
