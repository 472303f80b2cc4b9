// SPDX-License-Identifier: Apache-2.0
#include "memory/ipc_handle.h"

#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "support/error.h"
#include "support/mode.h"

namespace foundryd::memory::ipc {
namespace {

constexpr uint64_t kMagic = 0x3130435049594446;  // "FDYIPC01"

struct Known {
  std::mutex lock;
  std::optional<Identity> identity;
  std::optional<uint32_t> rank;  // as the program said it
};

Known &known() {
  // Never destroyed: see Arenas::instance.
  alignas(Known) static unsigned char storage[sizeof(Known)];
  static Known *const all = [] {
    auto *made = new (storage) Known;
    // A child is another process, and another thread may have held the lock.
    pthread_atfork(nullptr, nullptr, [] {
      Known &mine = known();
      new (&mine.lock) std::mutex;
      mine.identity.reset();
    });
    return made;
  }();
  return *all;
}

uint64_t draw() {
  uint64_t value = 0;
  while (getrandom(&value, sizeof value, 0) != sizeof value)
    if (errno != EINTR) throw Error(FDY_ERROR_STATE, "getrandom gives no bytes: %s", std::strerror(errno));
  return value;
}

// FNV-1a.  Tells groups apart; the secret is what keeps them apart.
uint64_t digest_of(const char *text) {
  uint64_t digest = 0xcbf29ce484222325;
  for (; *text; ++text) digest = (digest ^ static_cast<unsigned char>(*text)) * 0x100000001b3;
  return digest;
}

uint32_t rank_of_environment() {
  const char *text = std::getenv("RANK");
  if (!text || !*text) return 0;
  char *end = nullptr;
  errno = 0;
  const unsigned long value = std::strtoul(text, &end, 10);
  if (errno || *end || *text == '-' || value >= FDY_NONE)
    throw Error(FDY_ERROR_INVALID, "RANK is '%s', not a number from 0: correct it", text);
  return static_cast<uint32_t>(value);
}

Identity identity_locked(Known &all) {
  if (!all.identity) {
    const char *group = std::getenv("FOUNDRYD_GROUP");
    all.identity = Identity{.process = draw(),
                            .secret = draw(),
                            .group = digest_of(group && *group ? group : "default"),
                            .pid = getpid(),
                            .rank = all.rank ? *all.rank : rank_of_environment()};
  }
  return *all.identity;
}

}  // namespace

Identity identity() {
  Known &all = known();
  std::lock_guard guard(all.lock);
  return identity_locked(all);
}

void set_rank(uint32_t rank) {
  Known &all = known();
  std::lock_guard guard(all.lock);
  if (all.identity && all.identity->rank != rank)
    throw Error(FDY_ERROR_STATE,
                "this process made or opened IPC handles as rank %u and is now said to be rank %u: set the rank first",
                all.identity->rank, rank);
  all.rank = rank;
}

CUipcMemHandle handle_of(const Ticket &ticket) noexcept {
  CUipcMemHandle handle;
  std::memcpy(&handle, &ticket, sizeof handle);
  return handle;
}

Ticket ticket_for(uint64_t address, uint64_t bytes, uint64_t serial) {
  return {kMagic, identity(), address, bytes, serial};
}

std::optional<Ticket> ticket_of(const CUipcMemHandle &handle) noexcept {
  Ticket ticket;
  std::memcpy(&ticket, &handle, sizeof ticket);
  return ticket.magic == kMagic ? std::optional(ticket) : std::nullopt;
}

CUipcMemHandle peer_handle(const CUipcMemHandle &own, uint32_t rank) {
  if (!capturing())
    throw Error(FDY_ERROR_STATE, "a peer's handle is made with FOUNDRYD_MODE=%s, not capture: exchange real handles",
                restoring() ? "restore" : "(unset)");
  auto ticket = ticket_of(own);
  if (!ticket || ticket->exporter.process != identity().process)
    throw Error(FDY_ERROR_INVALID,
                "a peer's handle is made from one that is not this process's: give what cuIpcGetMemHandle answered for "
                "memory of an arena");
  ticket->exporter.rank = rank;
  return handle_of(*ticket);
}

}  // namespace foundryd::memory::ipc
