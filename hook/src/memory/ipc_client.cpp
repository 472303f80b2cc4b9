// SPDX-License-Identifier: Apache-2.0
//
// The importer's end.
#include <poll.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "memory/ipc_wire.h"
#include "support/error.h"

namespace foundryd::memory::ipc {
namespace {

constexpr auto kDeadline = std::chrono::seconds(10);  // for everything that the exporter owes

Error failure(const Ticket &ticket, CUresult result, const char *why) {
  return Error(FDY_ERROR_NOT_FOUND, "the memory at %#llx of rank %u (process %d) cannot be opened: %s",
               static_cast<unsigned long long>(ticket.address), ticket.exporter.rank, ticket.exporter.pid, why)
      .answered_with(result);
}

Error silent(const Ticket &ticket) {
  return failure(ticket, CUDA_ERROR_MAP_FAILED, "it did not answer within 10 s, so look whether it still runs");
}

Error gone(const Ticket &ticket) {
  return failure(ticket, CUDA_ERROR_MAP_FAILED, "that process has ended or is on another host: look at its log");
}

Error broken(const Ticket &ticket) {
  return failure(ticket, CUDA_ERROR_OPERATING_SYSTEM, std::strerror(errno));
}

void wait_for(int socket, short events, Clock::time_point until, const Ticket &ticket) {
  for (;;) {
    pollfd waiting{socket, events, 0};
    const int ready = poll(&waiting, 1, milliseconds_until(until));
    if (ready > 0) return;
    if (ready == 0) throw silent(ticket);
    if (errno != EINTR) throw broken(ticket);
  }
}

Descriptor connected(const Ticket &ticket, Clock::time_point until) {
  Descriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) throw broken(ticket);
  const Address address = address_of(ticket.exporter.process);
  while (connect(made.get(), address.get(), address.bytes) != 0) {
    if (errno == ECONNREFUSED) throw gone(ticket);
    if (errno != EAGAIN && errno != EINTR) throw broken(ticket);
    if (Clock::now() >= until) throw silent(ticket);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // its queue is full
  }
  if (!same_user(made.get()))
    throw failure(ticket, CUDA_ERROR_NOT_PERMITTED, "another user answers in its place, so run all ranks as one user");
  return made;
}

Fetched received(int socket, const Ticket &ticket, const Space &space) {
  Reply reply{};
  iovec part{&reply, sizeof reply};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  Descriptor descriptor;
  for (cmsghdr *header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    int file = -1;
    std::memcpy(&file, CMSG_DATA(header), sizeof file);
    descriptor = Descriptor(file);
  }
  if (got == 0 || (got < 0 && errno == ECONNRESET)) throw gone(ticket);
  if (got < 0) throw broken(ticket);
  if (got != static_cast<ssize_t>(sizeof reply) || reply.magic != kReplyMagic)
    throw failure(ticket, CUDA_ERROR_INVALID_HANDLE, "its answer is none, so use one foundryd on all ranks");
  switch (reply.verdict) {
    case Verdict::given:
      break;
    case Verdict::freed:
      throw failure(ticket, CUDA_ERROR_INVALID_VALUE, "it has been freed there, so exchange handles again");
    case Verdict::failed:
      throw failure(ticket, static_cast<CUresult>(reply.code), "exporting it failed there: look at that rank's log");
    default:
      throw failure(ticket, CUDA_ERROR_NOT_PERMITTED,
                    "it refuses, since user, group or handle are not its own: run all ranks as one user and group");
  }
  if (!descriptor)
    throw failure(ticket, CUDA_ERROR_OPERATING_SYSTEM, "no descriptor came with it: raise the limit of open files");
  if (reply.space.base != space.base || reply.space.stride != space.stride)
    throw failure(ticket, CUDA_ERROR_INVALID_HANDLE,
                  "its arenas lie elsewhere than here, so start all ranks with one archive");
  return {std::move(descriptor), reply.mapped};
}

}  // namespace

Fetched fetch(const Ticket &ticket, const Space &space) {
  const auto until = Clock::now() + kDeadline;
  const Descriptor socket = connected(ticket, until);
  wait_for(socket.get(), POLLOUT, until, ticket);
  if (send(socket.get(), &ticket, sizeof ticket, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof ticket) && errno != EPIPE)
    throw broken(ticket);  // with EPIPE there is an answer to read, or the end
  wait_for(socket.get(), POLLIN, until, ticket);
  return received(socket.get(), ticket, space);
}

}  // namespace foundryd::memory::ipc
