// SPDX-License-Identifier: Apache-2.0
#include "support/counters.h"

#include <atomic>
#include <initializer_list>

namespace foundryd {
namespace {
constinit fdy_counters values[2]{};
}

void count(uint64_t fdy_counters::*which, uint64_t by) noexcept {
  std::atomic_ref(values[static_cast<uint32_t>(owner())].*which).fetch_add(by, std::memory_order_relaxed);
}

fdy_counters counters(Owner of) noexcept {
  fdy_counters &from = values[static_cast<uint32_t>(of)];
  fdy_counters out{};
  for (auto which : {&fdy_counters::launches, &fdy_counters::captures, &fdy_counters::graph_launches,
                     &fdy_counters::instantiations, &fdy_counters::module_loads, &fdy_counters::allocations})
    out.*which = std::atomic_ref(from.*which).load(std::memory_order_relaxed);
  return out;
}

}  // namespace foundryd
