// SPDX-License-Identifier: Apache-2.0
//
// Handles of the arenas' memory in the place of the driver's legacy IPC handles, which memory of cuMemCreate does not
// have.  Programs pass them around as 64 opaque bytes.
#ifndef FOUNDRYD_HOOK_MEMORY_IPC_HANDLE_H
#define FOUNDRYD_HOOK_MEMORY_IPC_HANDLE_H

#include <cstdint>
#include <optional>

#include "support/cuda.h"

namespace foundryd::memory::ipc {

// This process as its peers know it.  `process` and `secret` are random: one names the socket, the other shows that a
// peer was given a handle.
struct Identity {
  uint64_t process;
  uint64_t secret;
  uint64_t group;  // digest of FOUNDRYD_GROUP
  int32_t pid;
  uint32_t rank;
};

// What lies in a CUipcMemHandle.
struct Ticket {
  uint64_t magic;
  Identity exporter;
  uint64_t address;  // of the allocation, in the exporter's arenas
  uint64_t bytes;
  uint64_t serial;  // of the allocation in the exporter
};
static_assert(sizeof(Ticket) == CU_IPC_HANDLE_SIZE);

// Throws Error if the environment's RANK is no rank.
Identity identity();
// The rank of this process, RANK if this is never called.  Throws Error once a handle has named another.
void set_rank(uint32_t rank);

CUipcMemHandle handle_of(const Ticket &ticket) noexcept;
Ticket ticket_for(uint64_t address, uint64_t bytes, uint64_t serial);
// Nothing if the handle is the driver's.
std::optional<Ticket> ticket_of(const CUipcMemHandle &handle) noexcept;
// While capturing: the handle of the same allocation on another rank, whose place a stand-in takes.
CUipcMemHandle peer_handle(const CUipcMemHandle &own, uint32_t rank);

}  // namespace foundryd::memory::ipc

#endif  // FOUNDRYD_HOOK_MEMORY_IPC_HANDLE_H
