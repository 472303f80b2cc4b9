// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"

namespace foundryd::bindings {
namespace {

void *handle(uint64_t value) {
  return reinterpret_cast<void *>(static_cast<uintptr_t>(value));
}

void comm_declare(const Hook &hook, uint64_t communicator, const Array<uint32_t> &ranks) {
  hook.call(hook->comm_declare, handle(communicator), ranks.data(), static_cast<uint64_t>(ranks.size()));
}

py::tuple communicators(const Hook &hook) {
  Buffer communicators(hook), ranks(hook);
  hook.call(hook->communicators, communicators.out(), ranks.out());
  return py::make_tuple(copy_array<fdy_communicator>(communicators), copy_array<uint32_t>(ranks));
}

py::array_t<fdy_comm_op> comm_ops(const Hook &hook) {
  Buffer buffer(hook);
  hook.call(hook->comm_ops, buffer.out());
  return copy_array<fdy_comm_op>(buffer);
}

uint64_t comm_reissue(const Hook &hook, const py::object &ops) {
  const auto array = require<fdy_comm_op>(ops, "ops");
  void *graph = nullptr;
  hook.call(hook->comm_reissue, array.data(), static_cast<uint64_t>(array.size()), &graph);
  return reinterpret_cast<uintptr_t>(graph);
}

}  // namespace

void define_comm(HookClass &hook) {
  hook.def("comm_declare", &comm_declare, py::arg("communicator"), py::arg("ranks"))
      .def("communicators", &communicators)
      .def("comm_ops", &comm_ops)
      .def("comm_reissue", &comm_reissue, py::arg("ops"));
}

}  // namespace foundryd::bindings
