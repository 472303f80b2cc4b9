// SPDX-License-Identifier: Apache-2.0
//
// Overrides: legacy IPC handles.  Those of the arenas' memory are the hook's; all others are the driver's.
#include "interpose/concepts.h"
#include "memory/ipc_handle.h"
#include "memory/ipc_transport.h"
#include "memory/rows.h"
#include "memory/windows.h"
#include "support/log.h"

using namespace foundryd;
using namespace foundryd::memory;

namespace {

// Engines report the code alone, so the cause goes to the log.
template <class Body>
CUresult logged(Body &&body) noexcept {
  return guard_driver([&] {
    try {
      return body();
    } catch (const Error &error) {
      warn("%s", error.what());
      throw;
    }
  });
}

}  // namespace

FDY_OVERRIDE CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
  if (!overriding() || !handle || !Arenas::instance().contains(address))
    return FDY_NEXT(cuIpcGetMemHandle, handle, address);
  return logged([&] {
    const auto found = Arenas::instance().find(address);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    const auto &[place, serial] = *found;
    if (place.arena == FDY_ARENA_HOST) return FDY_NEXT(cuIpcGetMemHandle, handle, address);
    const ipc::Ticket ticket = ipc::ticket_for(place.base, place.bytes, serial);
    if (restoring()) ipc::serve(ticket.exporter);
    *handle = ipc::handle_of(ticket);
    return CUDA_SUCCESS;
  });
}

FDY_OVERRIDE CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
  const auto ticket = overriding() ? ipc::ticket_of(handle) : std::nullopt;
  if (!ticket) return FDY_NEXT(cuIpcOpenMemHandle_v2, address, handle, flags);
  if (!address || (flags & ~unsigned{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS})) return CUDA_ERROR_INVALID_VALUE;
  return logged([&] {
    *address = Windows::instance().open(*ticket);
    return CUDA_SUCCESS;
  });
}

FDY_OVERRIDE CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
  if (!overriding() || !Windows::instance().contains(address)) return FDY_NEXT(cuIpcCloseMemHandle, address);
  return logged([&] { return Windows::instance().close(address); });
}

namespace foundryd::memory {

std::span<const Row> ipc_rows() {
  static const Row table[] = {
      FDY_ROW("cuIpcGetMemHandle", cuIpcGetMemHandle, 4010),
      FDY_ROW("cuIpcOpenMemHandle", cuIpcOpenMemHandle_v2, 11000),
      FDY_ROW("cuIpcCloseMemHandle", cuIpcCloseMemHandle, 4010),
  };
  return table;
}

}  // namespace foundryd::memory
