// SPDX-License-Identifier: Apache-2.0
#include "memory/managed.h"

#include <pthread.h>

#include <map>
#include <mutex>
#include <new>

#include "support/mode.h"

namespace foundryd::memory::managed {
namespace {

struct Ranges {
  std::mutex lock;
  std::map<uint64_t, uint64_t> by_address;
};

Ranges &ranges() {
  // Never destroyed, as the arenas are not.
  static Ranges &made = []() -> Ranges & {
    alignas(Ranges) static unsigned char storage[sizeof(Ranges)];
    auto *at = new (storage) Ranges;
    pthread_atfork(nullptr, nullptr, [] { new (&ranges().lock) std::mutex; });
    return *at;
  }();
  return made;
}

}  // namespace

void add(uint64_t address, uint64_t bytes) {
  Ranges &all = ranges();
  std::lock_guard guard(all.lock);
  all.by_address.insert_or_assign(address, bytes);
}

void remove(uint64_t address) noexcept {
  Ranges &all = ranges();
  std::lock_guard guard(all.lock);
  all.by_address.erase(address);
}

bool touches(uint64_t address, uint64_t bytes) noexcept {
  if (forked_with_contexts()) return false;
  Ranges &all = ranges();
  std::lock_guard guard(all.lock);
  auto next = all.by_address.lower_bound(address);
  if (next != all.by_address.end() && next->first - address < bytes) return true;
  if (next == all.by_address.begin()) return false;
  --next;
  return address - next->first < next->second;
}

}  // namespace foundryd::memory::managed
