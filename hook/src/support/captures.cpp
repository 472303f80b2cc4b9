// SPDX-License-Identifier: Apache-2.0
#include "support/captures.h"

#include <atomic>

namespace foundryd::captures {
namespace {
constinit std::atomic<int> running{0};
}

void began() noexcept {
  running.fetch_add(1, std::memory_order_acq_rel);
}
void ended() noexcept {
  running.fetch_sub(1, std::memory_order_acq_rel);
}
bool any() noexcept {
  return running.load(std::memory_order_acquire) > 0;
}

}  // namespace foundryd::captures
