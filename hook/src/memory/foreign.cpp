// SPDX-License-Identifier: Apache-2.0
#include "memory/foreign.h"

#include <pthread.h>

#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <set>

#include "support/mode.h"

namespace foundryd::memory::foreign {
namespace {

struct Range {
  uint64_t bytes;
  Kind kind;
};

struct Ranges {
  std::mutex lock;
  std::map<uint64_t, Range> by_address;
  std::set<uint64_t> objects;
};

constinit std::atomic<bool> some{false};

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

void add(uint64_t address, uint64_t bytes, Kind kind) {
  Ranges &all = ranges();
  std::lock_guard guard(all.lock);
  all.by_address.insert_or_assign(address, Range{bytes, kind});
  some.store(true, std::memory_order_release);
}

void remove(uint64_t address) noexcept {
  if (!any()) return;
  Ranges &all = ranges();
  std::lock_guard guard(all.lock);
  all.by_address.erase(address);
}

Kind touched(uint64_t address, uint64_t bytes) noexcept {
  if (!any() || forked_with_contexts()) return Kind::none;
  Ranges &all = ranges();
  std::lock_guard guard(all.lock);
  auto next = all.by_address.lower_bound(address);
  if (next != all.by_address.end() && next->first - address < bytes) return next->second.kind;
  if (next == all.by_address.begin()) return Kind::none;
  --next;
  return address - next->first < next->second.bytes ? next->second.kind : Kind::none;
}

void add_object(uint64_t object) {
  Ranges &all = ranges();
  std::lock_guard guard(all.lock);
  all.objects.insert(object);
  some.store(true, std::memory_order_release);
}

void remove_object(uint64_t object) noexcept {
  if (!any()) return;
  Ranges &all = ranges();
  std::lock_guard guard(all.lock);
  all.objects.erase(object);
}

bool is_object(uint64_t word) noexcept {
  if (!any() || forked_with_contexts()) return false;
  Ranges &all = ranges();
  std::lock_guard guard(all.lock);
  return all.objects.contains(word);
}

bool any() noexcept {
  return some.load(std::memory_order_acquire);
}

const char *name(Kind kind) noexcept {
  switch (kind) {
    case Kind::none:
      break;
    case Kind::managed:
      return "managed memory (cuMemAllocManaged), which cannot be restored: allocate it with cuMemAlloc";
    case Kind::communication:
      return "memory of a communication library (ncclMemAlloc), which a restore has elsewhere: allocate it with "
             "cuMemAlloc";
    case Kind::other_device:
      return "memory of another device than the one whose memory is in arenas, which a restore has elsewhere: use one "
             "device in a process";
    case Kind::registered:
      return "host memory outside the host arena, which the program registered (cuMemHostRegister): allocate it pinned "
             "(cuMemHostAlloc)";
  }
  return "no foreign memory";
}

}  // namespace foundryd::memory::foreign
