// SPDX-License-Identifier: Apache-2.0
//
// foundryd._native._hook.  Importing it needs neither the hook nor CUDA: the dtypes and enums are for everybody.
#include <pybind11/native_enum.h>

#include "api.h"

namespace foundryd::bindings {
namespace {

void define_enums(py::module_ &m) {
  py::native_enum<fdy_mode>(m, "HookMode", "enum.IntEnum")
      .value("OFF", FDY_MODE_OFF)
      .value("CAPTURE", FDY_MODE_CAPTURE)
      .value("RESTORE", FDY_MODE_RESTORE)
      .finalize();
  py::native_enum<fdy_arena>(m, "Arena", "enum.IntEnum")
      .value("DEFAULT", FDY_ARENA_DEFAULT)
      .value("WEIGHTS", FDY_ARENA_WEIGHTS)
      .value("KV", FDY_ARENA_KV)
      .value("IO", FDY_ARENA_IO)
      .value("GRAPH", FDY_ARENA_GRAPH)
      .value("HOST", FDY_ARENA_HOST)
      .finalize();
  py::native_enum<fdy_divergence_kind>(m, "DivergenceKind", "enum.IntEnum")
      .value("NONE", FDY_DIVERGENCE_NONE)
      .value("SIZE", FDY_DIVERGENCE_SIZE)
      .value("EXTRA", FDY_DIVERGENCE_EXTRA)
      .value("MISSING", FDY_DIVERGENCE_MISSING)
      .value("LIFETIME", FDY_DIVERGENCE_LIFETIME)
      .value("ADDRESS", FDY_DIVERGENCE_ADDRESS)
      .finalize();
  py::native_enum<fdy_module_api>(m, "ModuleApi", "enum.IntEnum")
      .value("MODULE_LOAD_DATA", FDY_MODULE_LOAD_DATA)
      .value("LIBRARY_LOAD_DATA", FDY_LIBRARY_LOAD_DATA)
      .finalize();
  py::native_enum<fdy_node_type>(m, "NodeType", "enum.IntEnum")
      .value("KERNEL", FDY_NODE_KERNEL)
      .value("MEMCPY", FDY_NODE_MEMCPY)
      .value("MEMSET", FDY_NODE_MEMSET)
      .value("EMPTY", FDY_NODE_EMPTY)
      .value("CHILD", FDY_NODE_CHILD)
      .value("COMM", FDY_NODE_COMM)
      .finalize();
  py::native_enum<fdy_param_kind>(m, "ParamKind", "enum.IntEnum")
      .value("NONE", FDY_PARAM_NONE)
      .value("LIST", FDY_PARAM_LIST)
      .value("EXTRA", FDY_PARAM_EXTRA)
      .value("STRUCT", FDY_PARAM_STRUCT)
      .finalize();
  py::native_enum<fdy_comm_op_kind>(m, "CommOpKind", "enum.IntEnum")
      .value("ALL_REDUCE", FDY_COMM_ALL_REDUCE)
      .value("ALL_GATHER", FDY_COMM_ALL_GATHER)
      .value("REDUCE_SCATTER", FDY_COMM_REDUCE_SCATTER)
      .value("BROADCAST", FDY_COMM_BROADCAST)
      .value("REDUCE", FDY_COMM_REDUCE)
      .value("ALL_TO_ALL", FDY_COMM_ALL_TO_ALL)
      .value("GATHER", FDY_COMM_GATHER)
      .value("SCATTER", FDY_COMM_SCATTER)
      .value("SEND", FDY_COMM_SEND)
      .value("RECV", FDY_COMM_RECV)
      .finalize();
  m.attr("NONE") = py::int_(FDY_NONE);
  m.attr("HOOK_ABI") = py::int_(FDY_HOOK_ABI);
  m.attr("SETTING_CACHE_CONFIG") = py::int_(FDY_SETTING_CACHE_CONFIG);
  m.attr("RESERVATION_FIRST") = py::int_(FDY_RESERVATION_FIRST);
  m.attr("RESERVATION_STRIDES") = py::int_(FDY_RESERVATION_STRIDES);
}

}  // namespace
}  // namespace foundryd::bindings

PYBIND11_MODULE(_hook, m) {
  using namespace foundryd::bindings;
  m.doc() = "The hook's interface and the plain structs of the archive as NumPy dtypes.";
  define_enums(m);
  define_arrays(m);
  define_heap(m);
  m.def("available", [] { return find_hook() != nullptr; }, "True if the hook is loaded into this process.");
  HookClass hook(m, "Hook", "The hook of this process.  Raises HookMissing if it is not preloaded.");
  hook.def(py::init<>());
  define_memory(m, hook);
  define_modules(hook);
  define_graphs(m, hook);
  define_comm(hook);
}
