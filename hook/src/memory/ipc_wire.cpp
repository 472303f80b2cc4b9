// SPDX-License-Identifier: Apache-2.0
#include "memory/ipc_wire.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>

namespace foundryd::memory::ipc {

void Descriptor::reset() noexcept {
  if (file_ >= 0) close(std::exchange(file_, -1));
}

Address address_of(uint64_t process) noexcept {
  Address out{};
  out.name.sun_family = AF_UNIX;
  // The first byte stays zero: an abstract name.
  const int length = std::snprintf(out.name.sun_path + 1, sizeof out.name.sun_path - 1, "foundryd-ipc-%016llx",
                                   static_cast<unsigned long long>(process));
  out.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
  return out;
}

bool same_user(int socket) noexcept {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

int milliseconds_until(Clock::time_point then) noexcept {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(then - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

bool send_reply(int socket, const Reply &reply, int descriptor) noexcept {
  iovec part{const_cast<Reply *>(&reply), sizeof reply};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptor)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof reply);
}

}  // namespace foundryd::memory::ipc
