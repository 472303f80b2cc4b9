// SPDX-License-Identifier: Apache-2.0
//
// Arrays handed to the caller of the fdy_hook table, who frees them with `free_buffer`.
#ifndef FOUNDRYD_HOOK_SUPPORT_BUFFER_H
#define FOUNDRYD_HOOK_SUPPORT_BUFFER_H

#include <cstdlib>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>

#include "foundryd/hook.h"

namespace foundryd {

// Copies `items`.  `out` is set last, so it is untouched if this throws.
template <class T>
void fill_buffer(fdy_buffer *out, std::span<const T> items) {
  static_assert(std::is_trivially_copyable_v<T>);
  void *data = nullptr;
  if (!items.empty()) {
    data = std::malloc(items.size_bytes());
    if (!data) throw std::bad_alloc();
    std::memcpy(data, items.data(), items.size_bytes());
  }
  *out = {data, items.size_bytes()};
}

// For any contiguous container.
template <class Container>
void fill_buffer(fdy_buffer *out, const Container &items) {
  fill_buffer(out, std::span<const typename Container::value_type>(items.data(), items.size()));
}

inline void release_buffer(fdy_buffer *buffer) noexcept {
  if (!buffer) return;
  std::free(buffer->data);
  *buffer = {nullptr, 0};
}

}  // namespace foundryd

#endif  // FOUNDRYD_HOOK_SUPPORT_BUFFER_H
