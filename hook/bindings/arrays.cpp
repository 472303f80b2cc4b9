// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"

namespace foundryd::bindings {
namespace {

template <class T>
void add_dtype(py::module_ &m, const char *name) {
  const py::dtype dtype = py::dtype::of<T>();
  if (dtype.itemsize() != static_cast<py::ssize_t>(sizeof(T)))
    throw py::import_error(std::string(name) + " is not as large as its struct");
  m.attr(name) = dtype;
}

}  // namespace

void define_arrays(py::module_ &m) {
  PYBIND11_NUMPY_DTYPE(fdy_allocation, address, bytes, arena, ordinal, live, reserved);
  PYBIND11_NUMPY_DTYPE(fdy_range, address, bytes);
  PYBIND11_NUMPY_DTYPE(fdy_divergence, kind, arena, ordinal, reserved, expected_bytes, actual_bytes);
  PYBIND11_NUMPY_DTYPE(fdy_window, address, bytes, origin, rank, reserved);
  PYBIND11_NUMPY_DTYPE(fdy_module, id, api, image_bytes, handle, live, communication);
  PYBIND11_NUMPY_DTYPE(fdy_function, module, name, param_count, param_bytes, param_first, setting_first, setting_count,
                       reserved);
  PYBIND11_NUMPY_DTYPE(fdy_field, offset, bytes);
  PYBIND11_NUMPY_DTYPE(fdy_setting, attribute, value);
  PYBIND11_NUMPY_DTYPE(fdy_global, module, name, address, bytes);
  PYBIND11_NUMPY_DTYPE(fdy_node, type, function, grid, block, shared_bytes, param_kind, param_offset, param_bytes,
                       attribute_first, attribute_count, comm_group, child);
  PYBIND11_NUMPY_DTYPE(fdy_edge, from, to, from_port, to_port, type, reserved);
  PYBIND11_NUMPY_DTYPE(fdy_attribute, id, reserved, value);
  PYBIND11_NUMPY_DTYPE(fdy_communicator, slot, size, rank, live, handle, member_first, member_count, declared,
                       reserved);
  PYBIND11_NUMPY_DTYPE(fdy_comm_op, send, recv, count, kind, datatype, reduction, peer, communicator, group);
  PYBIND11_NUMPY_DTYPE(fdy_counters, launches, captures, graph_launches, instantiations, module_loads, allocations);

  add_dtype<fdy_allocation>(m, "allocation_dtype");
  add_dtype<fdy_range>(m, "range_dtype");
  add_dtype<fdy_divergence>(m, "divergence_dtype");
  add_dtype<fdy_window>(m, "window_dtype");
  add_dtype<fdy_module>(m, "module_dtype");
  add_dtype<fdy_function>(m, "function_dtype");
  add_dtype<fdy_field>(m, "field_dtype");
  add_dtype<fdy_setting>(m, "setting_dtype");
  add_dtype<fdy_global>(m, "global_dtype");
  add_dtype<fdy_node>(m, "node_dtype");
  add_dtype<fdy_edge>(m, "edge_dtype");
  add_dtype<fdy_attribute>(m, "attribute_dtype");
  add_dtype<fdy_communicator>(m, "communicator_dtype");
  add_dtype<fdy_comm_op>(m, "comm_op_dtype");
  add_dtype<fdy_counters>(m, "counters_dtype");
}

std::string text_at(const Buffer &strings, size_t offset) {
  if (offset >= strings.bytes()) return {};
  const char *start = static_cast<const char *>(strings.data()) + offset;
  return {start, strnlen(start, strings.bytes() - offset)};
}

}  // namespace foundryd::bindings
