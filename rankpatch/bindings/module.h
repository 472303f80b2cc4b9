// SPDX-License-Identifier: Apache-2.0
#ifndef RANKPATCH_BINDINGS_MODULE_H
#define RANKPATCH_BINDINGS_MODULE_H

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

namespace rankpatch::bindings {

namespace py = pybind11;

// Arrays must come with the right type and be contiguous: nothing is converted or copied behind the caller's back.
template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
std::span<const T> view(const Array<T> &array) {
  if (array.size() && reinterpret_cast<uintptr_t>(array.data()) % alignof(T)) {
    throw std::invalid_argument("an array does not start at a multiple of " + std::to_string(alignof(T)) + " bytes");
  }
  return {array.data(), static_cast<size_t>(array.size())};
}

// Releases the lock for work that is worth it.  The arrays are kept alive by the caller's references.
class ReleaseIfLarge {
 public:
  explicit ReleaseIfLarge(size_t bytes) {
    if (bytes >= 1 << 16) release_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> release_;
};

void bind_plan(py::module_ &module);
void bind_block(py::module_ &module);

}  // namespace rankpatch::bindings

#endif  // RANKPATCH_BINDINGS_MODULE_H
