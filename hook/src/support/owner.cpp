// SPDX-License-Identifier: Apache-2.0
#include "support/owner.h"

#include <dlfcn.h>

#include <atomic>
#include <cstring>

#include "support/driver.h"

namespace foundryd {
namespace {

constinit thread_local Owner current = Owner::engine;

void tell_driver(Owner owner) noexcept {
  // Only the software driver has this; asking a real one again and again would cost a lookup a call.
  static constinit std::atomic<bool> asked{false};
  static constinit std::atomic<void (*)(uint32_t)> function{nullptr};
  if (!asked.load(std::memory_order_acquire)) {
    if (!driver::loaded()) return;
    function.store(reinterpret_cast<void (*)(uint32_t)>(driver::symbol("softcuda_set_owner")));
    asked.store(true, std::memory_order_release);
  }
  if (auto set_owner = function.load(std::memory_order_acquire)) set_owner(static_cast<uint32_t>(owner));
}

}  // namespace

Owner owner() noexcept {
  return current;
}

bool is_communication_library(const void *caller) noexcept {
  Dl_info info{};
  if (!dladdr(caller, &info) || !info.dli_fname) return false;
  const char *slash = std::strrchr(info.dli_fname, '/');
  const char *file = slash ? slash + 1 : info.dli_fname;
  return !std::strncmp(file, "libnccl", 7) || !std::strncmp(file, "libnvshmem", 10);
}

CommunicationScope::CommunicationScope(bool applies) noexcept : before_(current) {
  if (applies) current = Owner::communication;
  if (before_ != current) tell_driver(current);
}

CommunicationScope::~CommunicationScope() {
  if (before_ != current) tell_driver(before_);
  current = before_;
}

}  // namespace foundryd
