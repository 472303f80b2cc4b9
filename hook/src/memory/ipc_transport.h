// SPDX-License-Identifier: Apache-2.0
//
// How the memory behind a handle gets to a peer: a thread of the exporting process gives a descriptor to whoever shows
// a handle.  It listens on a Unix socket without a place in the file system, so nothing outlives the process: a peer of
// a dead one is refused by the kernel, at once.  No daemon is in between, since only the exporter can make a
// descriptor of its memory, and an engine may run without one.
//
// Three things are asked of a peer: the same user (the kernel says so), the group, and the exporter's secret.
#ifndef FOUNDRYD_HOOK_MEMORY_IPC_TRANSPORT_H
#define FOUNDRYD_HOOK_MEMORY_IPC_TRANSPORT_H

#include <utility>

#include "memory/backing.h"
#include "memory/ipc_handle.h"
#include "memory/placement.h"

namespace foundryd::memory::ipc {

class Descriptor {
 public:
  explicit Descriptor(int file = -1) noexcept : file_(file) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor &&other) noexcept : file_(std::exchange(other.file_, -1)) {}
  Descriptor &operator=(Descriptor &&other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  int get() const noexcept { return file_; }
  explicit operator bool() const noexcept { return file_ >= 0; }
  void reset() noexcept;

 private:
  int file_;
};

// Starts the thread, once in a process.  Throws Error.
void serve(const Identity &self);

struct Fetched {
  Descriptor descriptor;
  Mapped mapped;  // in the exporter's arenas
};

// Asks the exporter of `ticket` for the memory.  Throws Error if it is gone, refuses, or does not answer in time.
Fetched fetch(const Ticket &ticket, const Space &space);

}  // namespace foundryd::memory::ipc

#endif  // FOUNDRYD_HOOK_MEMORY_IPC_TRANSPORT_H
