// SPDX-License-Identifier: Apache-2.0
//
// The exporter's end: one thread, which never waits for any peer in particular.
#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "memory/ipc_wire.h"
#include "memory/state.h"
#include "support/driver.h"
#include "support/log.h"

namespace foundryd::memory::ipc {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);  // with a peer that has connected and asks nothing
constexpr auto kPause = std::chrono::milliseconds(50);
constexpr size_t kPeers = 64;  // at once; others wait to be accepted

struct Peer {
  Descriptor socket;
  Clock::time_point until;
};

Reply verdict(Verdict what, CUresult code = CUDA_SUCCESS) {
  return {.magic = kReplyMagic,
          .verdict = what,
          .code = static_cast<int32_t>(code),
          .space = Arenas::instance().space(),
          .mapped = {}};
}

class Server {
 public:
  static Server &instance();
  void start(const Identity &self);

 private:
  Server() = default;
  void listen_as(const Identity &self);
  void run() noexcept;
  bool turn(std::vector<Peer> &peers);
  bool accept_one(std::vector<Peer> &peers);
  void answer(int socket);
  void give(int socket, const Ticket &ticket);

  std::mutex lock_;
  bool started_ = false;
  Identity self_{};
  Descriptor listener_;
};

Server &Server::instance() {
  // Never destroyed: its thread runs until the process ends.
  alignas(Server) static unsigned char storage[sizeof(Server)];
  static Server *const server = [] {
    auto *made = new (storage) Server;
    // The thread is not in the child, and a socket that nobody serves would keep peers waiting.
    pthread_atfork(nullptr, nullptr, [] {
      Server &mine = instance();
      new (&mine.lock_) std::mutex;
      mine.listener_.reset();
      mine.started_ = false;
    });
    return made;
  }();
  return *server;
}

void Server::start(const Identity &self) {
  std::lock_guard guard(lock_);
  if (started_) return;
  listen_as(self);
  // The program's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([this] { run(); }).detach();
  } catch (const std::exception &error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    listener_.reset();
    throw Error(FDY_ERROR_STATE, "the thread that serves IPC handles did not start: %s", error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  started_ = true;
}

void Server::listen_as(const Identity &self) {
  Descriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const Address address = address_of(self.process);
  if (!made || bind(made.get(), address.get(), address.bytes) != 0 || listen(made.get(), SOMAXCONN) != 0)
    throw Error(FDY_ERROR_STATE, "the socket that serves IPC handles could not be made: %s", std::strerror(errno));
  self_ = self;
  listener_ = std::move(made);
}

void Server::run() noexcept {
  pthread_setname_np(pthread_self(), "foundryd-ipc");
  std::vector<Peer> peers;
  for (bool listening = true; listening;) {
    try {
      listening = turn(peers);
    } catch (const std::exception &error) {
      warn("a peer that asked for memory was not served: %s", error.what());
      peers.clear();
    }
  }
  warn("the socket that serves IPC handles was closed, so peers cannot open this process's memory any more");
}

// Whether there is a socket to go on with.
bool Server::turn(std::vector<Peer> &peers) {
  std::vector<pollfd> waiting;
  Clock::time_point first = Clock::time_point::max();
  for (const Peer &peer : peers) {
    waiting.push_back({peer.socket.get(), POLLIN, 0});
    first = std::min(first, peer.until);
  }
  if (peers.size() < kPeers) waiting.push_back({listener_.get(), POLLIN, 0});
  const int timeout = peers.empty() ? -1 : milliseconds_until(first);
  if (poll(waiting.data(), waiting.size(), timeout) < 0) {
    if (errno != EINTR) std::this_thread::sleep_for(kPause);
    return true;
  }
  const auto now = Clock::now();
  for (size_t i = 0; i < peers.size(); ++i) {
    if (waiting[i].revents != 0)
      answer(peers[i].socket.get());
    else if (now < peers[i].until)
      continue;
    peers[i].socket.reset();
  }
  const bool asked = waiting.size() > peers.size() && waiting.back().revents != 0;
  std::erase_if(peers, [](const Peer &peer) { return !peer.socket; });
  return !asked || accept_one(peers);
}

bool Server::accept_one(std::vector<Peer> &peers) {
  Descriptor peer(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!peer) {
    if (errno == EBADF || errno == ENOTSOCK || errno == EINVAL) return false;
    // Out of descriptors, most likely: the peer stays in the queue, and asking again at once would keep a core busy.
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) std::this_thread::sleep_for(kPause);
    return true;
  }
  if (same_user(peer.get()))
    peers.push_back({std::move(peer), Clock::now() + kPatience});
  else
    send_reply(peer.get(), verdict(Verdict::refused), -1);
  return true;
}

void Server::answer(int socket) {
  Ticket ticket{};
  const ssize_t got = recv(socket, &ticket, sizeof ticket, MSG_TRUNC);
  if (got <= 0) return;
  const bool known = got == static_cast<ssize_t>(sizeof ticket) && ticket_of(handle_of(ticket)) &&
                     ticket.exporter.process == self_.process && ticket.exporter.secret == self_.secret &&
                     ticket.exporter.group == self_.group && ticket.exporter.rank == self_.rank;
  if (known)
    give(socket, ticket);
  else
    send_reply(socket, verdict(Verdict::refused), -1);
}

void Server::give(int socket, const Ticket &ticket) {
  try {
    const CurrentContext current;
    const RelaxedCapture relaxed;
    const auto shared = Arenas::instance().share(ticket.address, ticket.serial);
    if (!shared) {
      send_reply(socket, verdict(Verdict::freed), -1);
      return;
    }
    int file = -1;
    FDY_CU(cuMemExportToShareableHandle, &file, shared->memory.handle(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    const Descriptor exported(file);
    Reply reply = verdict(Verdict::given);
    reply.mapped = shared->mapped;
    send_reply(socket, reply, exported.get());
  } catch (const Error &error) {
    send_reply(socket, verdict(Verdict::failed, error.as_driver_result()), -1);
    throw;
  }
}

}  // namespace

void serve(const Identity &self) {
  Server::instance().start(self);
}

}  // namespace foundryd::memory::ipc
