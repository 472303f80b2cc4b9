// SPDX-License-Identifier: Apache-2.0
#include "rankpatch/plan.h"

#include <pybind11/stl.h>

#include "module.h"

namespace rankpatch::bindings {
namespace {

Array<fp_write> plan_for(const Array<fp_rule> &rules, const Array<uint64_t> &tables, const Coordinates &coordinates,
                         uint32_t world) {
  const auto all = view(rules);
  Array<fp_write> writes(static_cast<py::ssize_t>(count_writes(all)));
  const std::span<fp_write> out(writes.mutable_data(), static_cast<size_t>(writes.size()));
  const ReleaseIfLarge release(all.size_bytes());
  plan(all, view(tables), coordinates, world, out);
  return writes;
}

}  // namespace

void bind_plan(py::module_ &module) {
  using py::literals::operator""_a;
  module.def("plan", &plan_for, "rules"_a.noconvert(), "tables"_a.noconvert(), "coordinates"_a, "world"_a,
             "The writes of one rank, in the order of the rules; noise gives none.");
  module.def(
      "check_rules",
      [](const Array<fp_rule> &rules, uint64_t table_count, uint32_t world) {
        const ReleaseIfLarge release(view(rules).size_bytes());
        check_rules(view(rules), table_count, world);
      },
      "rules"_a.noconvert(), "table_count"_a, "world"_a, "Raises InvalidRules that names the first bad rule.");
  module.def(
      "check_writes",
      [](const Array<fp_write> &writes) {
        const ReleaseIfLarge release(view(writes).size_bytes());
        check_writes(view(writes));
      },
      "writes"_a.noconvert(), "Raises InvalidRules that names the first bad write.");
}

}  // namespace rankpatch::bindings
