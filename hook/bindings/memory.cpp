// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"

namespace foundryd::bindings {
namespace {

// Read-only bytes of any object with a contiguous buffer.
class View {
 public:
  View(const py::object &object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags | PyBUF_C_CONTIGUOUS) != 0) throw py::error_already_set();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View &) = delete;
  View &operator=(const View &) = delete;
  void *data() const { return view_.buf; }
  uint64_t bytes() const { return static_cast<uint64_t>(view_.len); }

 private:
  Py_buffer view_{};
};

py::dict counters(const fdy_counters &c) {
  using namespace py::literals;
  return py::dict("launches"_a = c.launches, "captures"_a = c.captures, "graph_launches"_a = c.graph_launches,
                  "instantiations"_a = c.instantiations, "module_loads"_a = c.module_loads,
                  "allocations"_a = c.allocations);
}

fdy_report report(const Hook &hook) {
  fdy_report out{};
  hook.call(hook->report, &out);
  return out;
}

void set_layout(const Hook &hook, uint64_t base, uint64_t stride, const py::object &allocations) {
  const auto array = require<fdy_allocation>(allocations, "allocations");
  const fdy_layout layout{base, stride, array.data(), static_cast<uint64_t>(array.size())};
  hook.call(hook->set_layout, &layout);
}

py::array_t<fdy_allocation> allocations(const Hook &hook) {
  Buffer buffer(hook);
  hook.call(hook->allocations, buffer.out());
  return copy_array<fdy_allocation>(buffer);
}

fdy_divergence divergence(const Hook &hook) {
  fdy_divergence out{};
  hook.call(hook->divergence, &out);
  return out;
}

void upload(const Hook &hook, uint64_t address, const py::object &data) {
  const View view(data, PyBUF_SIMPLE);
  hook.call(hook->upload, address, static_cast<const void *>(view.data()), view.bytes());
}

py::array_t<uint8_t> download(const Hook &hook, uint64_t address, uint64_t bytes) {
  py::array_t<uint8_t> out(static_cast<py::ssize_t>(bytes));
  hook.call(hook->download, address, static_cast<void *>(out.mutable_data()), bytes);
  return out;
}

void download_into(const Hook &hook, uint64_t address, const py::object &target) {
  const View view(target, PyBUF_WRITABLE);
  hook.call(hook->download, address, view.data(), view.bytes());
}

py::bytes ipc_peer_handle(const Hook &hook, const py::object &own, uint32_t rank) {
  const View view(own, PyBUF_SIMPLE);
  char out[64];
  if (view.bytes() != sizeof out)
    raise("UsageError", "an IPC handle has 64 bytes, and this one has " + std::to_string(view.bytes()));
  hook.call(hook->ipc_peer_handle, static_cast<const void *>(view.data()), rank, static_cast<void *>(out));
  return py::bytes(out, sizeof out);
}

py::array_t<fdy_window> windows(const Hook &hook) {
  Buffer buffer(hook);
  hook.call(hook->windows, buffer.out());
  return copy_array<fdy_window>(buffer);
}

}  // namespace

void define_memory(py::module_ &m, HookClass &hook) {
  py::class_<fdy_report>(m, "Report")
      .def_readonly("mode", &fdy_report::mode)
      .def_readonly("rows_installed", &fdy_report::rows_installed)
      .def_readonly("contexts", &fdy_report::contexts)
      .def_readonly("arena_base", &fdy_report::arena_base)
      .def_readonly("arena_stride", &fdy_report::arena_stride)
      .def_property_readonly("engine", [](const fdy_report &r) { return counters(r.engine); })
      .def_property_readonly("communication", [](const fdy_report &r) { return counters(r.communication); })
      .def_readonly("driver_ns", &fdy_report::driver_ns)
      .def_readonly("driver_calls", &fdy_report::driver_calls);
  py::class_<fdy_divergence>(m, "Divergence")
      .def_readonly("kind", &fdy_divergence::kind)
      .def_readonly("arena", &fdy_divergence::arena)
      .def_readonly("ordinal", &fdy_divergence::ordinal)
      .def_readonly("expected_bytes", &fdy_divergence::expected_bytes)
      .def_readonly("actual_bytes", &fdy_divergence::actual_bytes);

  hook.def("report", &report)
      .def(
          "time_driver", [](const Hook &h, bool on) { h.call(h->time_driver, static_cast<uint32_t>(on)); },
          py::arg("on"))
      .def("driver_enter", [](const Hook &h) { h.call(h->driver_enter); })
      .def("driver_leave", [](const Hook &h) { h.call(h->driver_leave); })
      .def(
          "arena_push", [](const Hook &h, uint32_t arena) { h.call(h->arena_push, arena); }, py::arg("arena"))
      .def("arena_pop", [](const Hook &h) { h.call(h->arena_pop); })
      .def("set_layout", &set_layout, py::arg("arena_base"), py::arg("arena_stride"), py::arg("allocations"))
      .def("allocations", &allocations)
      .def("divergence", &divergence)
      .def("map_held", [](const Hook &h) { h.call(h->map_held); })
      .def("release_held", [](const Hook &h) { h.call(h->release_held); })
      .def("upload", &upload, py::arg("address"), py::arg("data"))
      .def("download", &download, py::arg("address"), py::arg("bytes"))
      .def("download_into", &download_into, py::arg("address"), py::arg("target"))
      .def(
          "set_rank", [](const Hook &h, uint32_t rank) { h.call(h->set_rank, rank); }, py::arg("rank"))
      .def("ipc_peer_handle", &ipc_peer_handle, py::arg("own"), py::arg("rank"))
      .def("windows", &windows);
}

}  // namespace foundryd::bindings
