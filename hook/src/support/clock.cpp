// SPDX-License-Identifier: Apache-2.0
#include "support/clock.h"

#include <ctime>

namespace foundryd::clock {
namespace {

struct State {
  Spent spent;
  unsigned depth;
  uint64_t since;
};

constinit thread_local State mine{};

uint64_t now() noexcept {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace

void enter() noexcept {
  if (mine.depth++ == 0) mine.since = now();
}

bool leave() noexcept {
  if (mine.depth == 0) return false;
  if (--mine.depth == 0) {
    mine.spent.ns += now() - mine.since;
    ++mine.spent.calls;
  }
  return true;
}

Spent spent() noexcept {
  return mine.spent;
}

}  // namespace foundryd::clock
