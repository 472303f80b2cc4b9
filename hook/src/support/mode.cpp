// SPDX-License-Identifier: Apache-2.0
#include "support/mode.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "support/driver.h"
#include "support/log.h"

namespace foundryd {
namespace {

constinit std::atomic<unsigned> context_count{0};

int mode_of_environment() noexcept {
  const char *text = std::getenv("FOUNDRYD_MODE");
  if (!text || !*text) return FDY_MODE_OFF;
  if (!std::strcmp(text, "capture")) return FDY_MODE_CAPTURE;
  if (!std::strcmp(text, "restore")) return FDY_MODE_RESTORE;
  if (std::strcmp(text, "off") != 0)
    warn("FOUNDRYD_MODE is '%s', not 'capture' or 'restore', so the hook does nothing: unset it or correct it", text);
  return FDY_MODE_OFF;
}

void after_fork_in_child() {
  if (context_count.load(std::memory_order_relaxed) != 0) detail::forked.store(true, std::memory_order_relaxed);
}

__attribute__((constructor)) void watch_forks() {
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
}

}  // namespace

fdy_mode detail::read_mode() noexcept {
  const int value = mode_of_environment();
  mode.store(value, std::memory_order_relaxed);
  return static_cast<fdy_mode>(value);
}

unsigned contexts() noexcept {
  return context_count.load(std::memory_order_relaxed);
}

void note_context() noexcept {
  context_count.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace foundryd
