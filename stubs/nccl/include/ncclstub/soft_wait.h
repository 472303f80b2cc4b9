// SPDX-License-Identifier: Apache-2.0
//
// Waiting for other ranks: on futexes, never spinning, with a deadline, noticing peers that ended or died.
#ifndef NCCLSTUB_SOFT_WAIT_H
#define NCCLSTUB_SOFT_WAIT_H

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <ctime>

#include "ncclstub/soft_state.h"

namespace ncclstub::soft {

enum class Waited { reached, stopped, failed };

// Keeps the first asynchronous error of a communicator.
[[gnu::format(printf, 3, 4)]] inline void set_error(CommState &state, ncclResult_t result, const char *format, ...) {
  if (state.error_claimed.exchange(true)) return;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(state.message, sizeof state.message, format, arguments);
  va_end(arguments);
  state.error.store(result, std::memory_order_release);
}

inline uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// Returns when the word is not `value`, when it is woken, or after a slice of time in which nothing came.
inline void sleep_on(const Word &word, uint32_t value) {
  const timespec slice{0, 50'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &slice, nullptr, 0);
}

inline void wake(const Word &word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

inline void raise(Word &word, uint32_t value) {
  word.store(value, std::memory_order_release);
  wake(word);
}

// Whether a rank's process still holds its lock.  An open-file-description lock ends with the last descriptor, so it
// also tells of a process that was killed, across pid namespaces.
inline bool alive(const CommState &state, uint32_t rank) {
  if (rank == state.rank) return true;  // a description does not see its own locks
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(state.descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// One patience: the time within which something must move.
class Deadline {
 public:
  explicit Deadline(const CommState &state) : end_(now_ns() + state.timeout_ns) {}
  bool passed() const { return now_ns() >= end_; }

 private:
  uint64_t end_;
};

// Looks at why a wait for `peer` may be in vain; `moved` tells whether what it waits for has come meanwhile.
template <class Moved>
Waited look(CommState &state, uint32_t peer, const Deadline &deadline, const char *what, Moved moved) {
  if (state.stopped) return Waited::stopped;
  if (state.error != ncclSuccess) return Waited::failed;
  const bool left = state.segment->cell(peer).left.load(std::memory_order_acquire) != 0;
  const bool dead = !left && !alive(state, peer);
  if (left || dead) {
    if (moved()) return Waited::reached;  // it came before the end
    set_error(state, ncclRemoteError, "rank %u waits in %s for rank %u, which %s: restart the group", state.rank, what,
              peer, left ? "has left the communicator" : "has died");
    return Waited::failed;
  }
  if (!deadline.passed()) return Waited::reached;
  if (moved()) return Waited::reached;
  set_error(state, ncclRemoteError,
            "rank %u waited %.1f s in %s for rank %u, which did not come: look at that rank, or raise "
            "FOUNDRYD_NCCL_TIMEOUT",
            state.rank, static_cast<double>(state.timeout_ns) * 1e-9, what, peer);
  return Waited::failed;
}

// Waits until a peer's counter, which only grows, has reached `target`.
inline Waited wait_for(CommState &state, uint32_t peer, const Word &counter, uint32_t target, const char *what) {
  const Deadline deadline(state);
  const auto reached = [&] { return static_cast<int32_t>(counter.load(std::memory_order_acquire) - target) >= 0; };
  for (;;) {
    const uint32_t seen = counter.load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - target) >= 0) return Waited::reached;
    if (state.stopped) return Waited::stopped;
    sleep_on(counter, seen);
    if (reached()) return Waited::reached;
    if (const Waited found = look(state, peer, deadline, what, reached); found != Waited::reached) return found;
  }
}

}  // namespace ncclstub::soft

#endif  // NCCLSTUB_SOFT_WAIT_H
