// SPDX-License-Identifier: Apache-2.0
//
// The hook as the bindings see it, and how its failures become Python exceptions.
#ifndef FOUNDRYD_BINDINGS_API_H
#define FOUNDRYD_BINDINGS_API_H

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "foundryd/hook.h"

namespace foundryd::bindings {

namespace py = pybind11;

// The table of the hook in this process, or NULL.
const fdy_hook *find_hook();

// Raises foundryd.errors.<type> with `message`.
[[noreturn]] void raise(const char *type, const std::string &message);

// Raises what `last_error` says.
[[noreturn]] void raise_last(const fdy_hook &hook);

// The hook; constructing one raises HookMissing where there is none.
class Hook {
 public:
  Hook();
  const fdy_hook *operator->() const { return hook_; }

  // Calls an entry without the GIL, and raises its failure.
  template <class Entry, class... A>
  void call(Entry entry, A... arguments) const {
    int status;
    {
      py::gil_scoped_release release;
      status = entry(arguments...);
    }
    if (status != FDY_OK) raise_last(*hook_);
  }

 private:
  const fdy_hook *hook_;
};

// Frees what the hook filled.
class Buffer {
 public:
  explicit Buffer(const Hook &hook) : hook_(hook) {}
  ~Buffer() { hook_->free_buffer(&buffer_); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  fdy_buffer *out() { return &buffer_; }
  const void *data() const { return buffer_.data; }
  size_t bytes() const { return buffer_.bytes; }

 private:
  const Hook &hook_;
  fdy_buffer buffer_{};
};

using HookClass = py::class_<Hook>;

void define_arrays(py::module_ &m);
void define_heap(py::module_ &m);
void define_memory(py::module_ &m, HookClass &hook);
void define_modules(HookClass &hook);
void define_graphs(py::module_ &m, HookClass &hook);
void define_comm(HookClass &hook);

}  // namespace foundryd::bindings

#endif  // FOUNDRYD_BINDINGS_API_H
