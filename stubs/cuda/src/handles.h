// SPDX-License-Identifier: Apache-2.0
//
// A table of live objects of one type.  A handle is the object's address; a stale or foreign handle is found out
// instead of being dereferenced.
#ifndef SOFTCUDA_HANDLES_H
#define SOFTCUDA_HANDLES_H

#include <memory>
#include <unordered_map>
#include <utility>

#include "failure.h"

namespace softcuda {

template <class T, class Handle>
class Handles {
 public:
  template <class... A>
  std::shared_ptr<T> make(A &&...arguments) {
    auto object = std::make_shared<T>(std::forward<A>(arguments)...);
    objects_.emplace(object.get(), object);
    return object;
  }

  void add(const std::shared_ptr<T> &object) { objects_.emplace(object.get(), object); }

  std::shared_ptr<T> find(Handle handle) const {
    const auto it = objects_.find(reinterpret_cast<const T *>(handle));
    return it == objects_.end() ? nullptr : it->second;
  }

  std::shared_ptr<T> get(Handle handle, CUresult otherwise = CUDA_ERROR_INVALID_HANDLE) const {
    auto object = find(handle);
    require(object != nullptr, otherwise);
    return object;
  }

  // The object lives on as long as someone else holds it.
  std::shared_ptr<T> remove(const T *object) {
    const auto it = objects_.find(object);
    if (it == objects_.end()) return nullptr;
    auto held = std::move(it->second);
    objects_.erase(it);
    return held;
  }

  static Handle handle(const T *object) { return reinterpret_cast<Handle>(const_cast<T *>(object)); }
  static Handle handle(const std::shared_ptr<T> &object) { return handle(object.get()); }

  template <class Visit>
  void each(Visit visit) const {
    for (const auto &[key, object] : objects_) visit(object);
  }

 private:
  std::unordered_map<const T *, std::shared_ptr<T>> objects_;
};

}  // namespace softcuda

#endif  // SOFTCUDA_HANDLES_H
