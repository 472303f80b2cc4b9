// SPDX-License-Identifier: Apache-2.0
#ifndef FOUNDRYD_HOOK_MODULES_STRINGS_H
#define FOUNDRYD_HOOK_MODULES_STRINGS_H

#include <cstdint>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "support/buffer.h"

namespace foundryd::modules {

// A block of NUL-terminated names that records refer to by offset.
class Strings {
 public:
  uint32_t add(std::string_view text) {
    const auto at = static_cast<uint32_t>(block_.size());
    block_.insert(block_.end(), text.begin(), text.end());
    block_.push_back('\0');
    return at;
  }
  const std::vector<char> &block() const { return block_; }

 private:
  std::vector<char> block_;
};

// Fills several buffers, all or none.
template <class... V>
void fill_buffers(std::pair<fdy_buffer *, V *>... outputs) {
  fdy_buffer made[sizeof...(V)] = {};
  size_t i = 0;
  try {
    (fill_buffer(&made[i++], *outputs.second), ...);
  } catch (...) {
    for (fdy_buffer &buffer : made) release_buffer(&buffer);
    throw;
  }
  i = 0;
  ((*outputs.first = made[i++]), ...);
}

}  // namespace foundryd::modules

#endif  // FOUNDRYD_HOOK_MODULES_STRINGS_H
