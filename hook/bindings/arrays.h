// SPDX-License-Identifier: Apache-2.0
//
// Plain structs as NumPy structured arrays, in both directions.
#ifndef FOUNDRYD_BINDINGS_ARRAYS_H
#define FOUNDRYD_BINDINGS_ARRAYS_H

#include <pybind11/numpy.h>

#include <cstring>
#include <string>

#include "api.h"

namespace foundryd::bindings {

// A parameter type that accepts any array-like of the right dtype, contiguous.
template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
py::array_t<T> copy_array(const T *data, size_t count) {
  py::array_t<T> out(static_cast<py::ssize_t>(count));
  if (count != 0) std::memcpy(out.mutable_data(), data, count * sizeof(T));
  return out;
}

template <class T>
py::array_t<T> copy_array(const Buffer &buffer) {
  return copy_array(static_cast<const T *>(buffer.data()), buffer.bytes() / sizeof(T));
}

// A one-dimensional array of exactly this struct.  Nothing is cast: a wrong dtype is a wrong call.
template <class T>
py::array_t<T> require(const py::object &value, const char *what) {
  if (!py::isinstance<py::array_t<T>>(value))
    raise("UsageError", std::string(what) + " is not a NumPy array of " +
                            std::string(py::str(static_cast<py::object>(py::dtype::of<T>()))) +
                            ": use the dtype of foundryd._native._hook");
  auto array = py::reinterpret_borrow<py::array_t<T>>(value);
  if (array.ndim() != 1)
    raise("UsageError", std::string(what) + " has " + std::to_string(array.ndim()) + " dimensions, not 1");
  if (!(array.flags() & py::array::c_style)) array = py::array_t<T>::ensure(array.attr("copy")());
  return array;
}

// The NUL-terminated text at `offset` of a string block.
std::string text_at(const Buffer &strings, size_t offset);

}  // namespace foundryd::bindings

#endif  // FOUNDRYD_BINDINGS_ARRAYS_H
