// SPDX-License-Identifier: Apache-2.0
#include "rankpatch/block.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "module.h"

namespace rankpatch::bindings {
namespace {

template <class T>
std::span<T> writable(Array<T> &array) {
  if (!array.writeable()) throw std::invalid_argument("the block is read-only");
  return {array.mutable_data(), static_cast<size_t>(array.size())};
}

std::vector<std::span<const uint8_t>> views(const std::vector<Array<uint8_t>> &arrays) {
  std::vector<std::span<const uint8_t>> out;
  out.reserve(arrays.size());
  for (const auto &array : arrays) out.push_back(view(array));
  return out;
}

void expand_block(Array<uint8_t> &block, const std::vector<Array<uint8_t>> &base, const Array<uint32_t> &positions,
                  const Array<uint32_t> &columns, size_t column) {
  if (columns.ndim() != 2) throw std::invalid_argument("columns is not a matrix");
  const std::span<uint8_t> out = writable(block);
  const auto pieces = views(base);
  const auto count = static_cast<size_t>(columns.shape(1));
  const ReleaseIfLarge release(out.size());
  expand(out, pieces, view(positions), view(columns), count, column);
}

void turn_columns(Array<uint32_t> &block, const Array<uint32_t> &columns, size_t first) {
  if (block.ndim() != 2 || columns.ndim() != 2) throw std::invalid_argument("block or columns is not a matrix");
  const std::span<uint32_t> out = writable(block);
  const auto all = static_cast<size_t>(columns.shape(1));
  const auto count = static_cast<size_t>(block.shape(0));
  const ReleaseIfLarge release(out.size_bytes());
  turn(out, view(columns), all, first, count);
}

void apply_writes(Array<uint8_t> &block, const Array<fp_write> &writes) {
  const std::span<uint8_t> out = writable(block);
  const ReleaseIfLarge release(view(writes).size_bytes());
  apply(out, view(writes));
}

void relocate_words(Array<uint8_t> &block, const Array<fp_relocation> &relocations, const Array<uint64_t> &symbols) {
  const std::span<uint8_t> out = writable(block);
  const ReleaseIfLarge release(view(relocations).size_bytes());
  relocate(out, view(relocations), view(symbols));
}

Array<uint32_t> differing_words(const Array<uint8_t> &reference, const std::vector<Array<uint8_t>> &others,
                                uint32_t width) {
  const auto spans = views(others);
  std::vector<uint32_t> found;
  {
    const ReleaseIfLarge release(static_cast<size_t>(reference.size()));
    found = differing(view(reference), spans, width);
  }
  return Array<uint32_t>(static_cast<py::ssize_t>(found.size()), found.data());
}

}  // namespace

void bind_block(py::module_ &module) {
  using py::literals::operator""_a;
  module.def(
      "expand", &expand_block, "block"_a.noconvert(), "base"_a.noconvert(), "positions"_a.noconvert(),
      "columns"_a.noconvert(), "column"_a,
      "Makes a member in a block: the pieces of the template's, with one column added to the words at `positions`.");
  module.def("turn", &turn_columns, "block"_a.noconvert(), "columns"_a.noconvert(), "first"_a,
             "Makes neighbouring columns of a matrix the rows of a block, in place.");
  module.def("relocate", &relocate_words, "block"_a.noconvert(), "relocations"_a.noconvert(), "symbols"_a.noconvert(),
             "Stores addresses of symbols into a block, in place; nothing is stored if one of them does not fit.");
  module.def("apply", &apply_writes, "block"_a.noconvert(), "writes"_a.noconvert(),
             "Stores writes into a block, in place; nothing is stored if one of them does not fit.");
  module.def("differing", &differing_words, "reference"_a.noconvert(), "others"_a.noconvert(), "width"_a = 4,
             "Ascending offsets of the words in which any of `others` differs from `reference`.");
}

}  // namespace rankpatch::bindings
