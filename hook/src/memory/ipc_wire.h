// SPDX-License-Identifier: Apache-2.0
//
// Both ends of the exporter's socket: a peer sends a Ticket, the exporter answers with a Reply and perhaps a
// descriptor.
#ifndef FOUNDRYD_HOOK_MEMORY_IPC_WIRE_H
#define FOUNDRYD_HOOK_MEMORY_IPC_WIRE_H

#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstdint>

#include "memory/ipc_transport.h"

namespace foundryd::memory::ipc {

enum class Verdict : uint32_t { given = 0, refused = 1, freed = 2, failed = 3 };

struct Reply {
  uint64_t magic;
  Verdict verdict;
  int32_t code;  // CUresult, if failed
  Space space;
  Mapped mapped;
};
inline constexpr uint64_t kReplyMagic = 0x314c504552594446;  // "FDYREPL1"

using Clock = std::chrono::steady_clock;

struct Address {
  sockaddr_un name;
  socklen_t bytes;
  const sockaddr *get() const { return reinterpret_cast<const sockaddr *>(&name); }
};
Address address_of(uint64_t process) noexcept;

// Whether the other end was made by the user of this process.
bool same_user(int socket) noexcept;

// Milliseconds until then, for poll: rounded up, 0 if it is past.
int milliseconds_until(Clock::time_point then) noexcept;

// One message, with `descriptor` unless it is -1.  False if it cannot be sent now.
bool send_reply(int socket, const Reply &reply, int descriptor) noexcept;

}  // namespace foundryd::memory::ipc

#endif  // FOUNDRYD_HOOK_MEMORY_IPC_WIRE_H
