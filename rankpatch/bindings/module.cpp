// SPDX-License-Identifier: Apache-2.0
#include "module.h"

#include "rankpatch/plan.h"

PYBIND11_MODULE(_rankpatch, module) {
  using namespace rankpatch;
  module.doc() = "The core of rank patching: plans from rules, and what is done to the bytes of a block.";
  PYBIND11_NUMPY_DTYPE(fp_rule, block, offset, width, kind, coordinate, reserved, table, base, stride);
  PYBIND11_NUMPY_DTYPE(fp_write, block, offset, width, reserved, value);
  PYBIND11_NUMPY_DTYPE(fp_relocation, block, offset, symbol, reserved, addend);
  module.attr("rule_dtype") = pybind11::dtype::of<fp_rule>();
  module.attr("write_dtype") = pybind11::dtype::of<fp_write>();
  module.attr("relocation_dtype") = pybind11::dtype::of<fp_relocation>();
  const auto &invalid = pybind11::register_exception<InvalidRules>(module, "InvalidRules", PyExc_ValueError);
  pybind11::register_exception<UnknownCoordinate>(module, "UnknownCoordinate", invalid);
  module.attr("UNKNOWN") = kUnknownCoordinate;
  bindings::bind_plan(module);
  bindings::bind_block(module);
}
