// SPDX-License-Identifier: Apache-2.0
//
// Legacy IPC handles: for memory of cuMemAlloc alone, and for another process alone.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "context.h"
#include "memory.h"

namespace softcuda {

namespace {

constexpr uint64_t kMagic = 0x3163706974666f73u;

// What lies in a CUipcMemHandle.
struct Ticket {
  uint64_t magic;
  int32_t process;
  int32_t file;
  uint64_t offset;
  uint64_t mapping_bytes;
  uint64_t shift;
  uint64_t bytes;
  int32_t device;
  int32_t reserved;
};
static_assert(sizeof(Ticket) <= CU_IPC_HANDLE_SIZE);

}  // namespace

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr) {
  return locked_call([&] {
    require(pHandle != nullptr);
    current_context();
    const Range *range = ranges().find(dptr);
    require(range != nullptr && range->kind == Kind::Plain);
    const Ticket ticket{kMagic,
                        getpid(),
                        range->extent->file(),
                        range->extent->offset(),
                        range->mapping_bytes,
                        range->base - range->mapping,
                        range->bytes,
                        range->device,
                        0};
    std::memset(pHandle, 0, sizeof *pHandle);
    std::memcpy(pHandle, &ticket, sizeof ticket);
  });
}

SOFTCUDA_API cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
  return locked_call([&] {
    require(pdptr != nullptr && (Flags & ~unsigned{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS}) == 0);
    const auto context = current_context();
    Ticket ticket{};
    std::memcpy(&ticket, &handle, sizeof ticket);
    require(ticket.magic == kMagic);
    require(ticket.process != getpid(), CUDA_ERROR_INVALID_CONTEXT);
    const std::string path = "/proc/" + std::to_string(ticket.process) + "/fd/" + std::to_string(ticket.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    require(file >= 0, CUDA_ERROR_MAP_FAILED);
    const auto extent = std::make_shared<Extent>(file, ticket.offset, ticket.mapping_bytes, ticket.device);
    const uint64_t mapping = place_anywhere(ticket.mapping_bytes, kGranule);
    extent->map(mapping, ticket.mapping_bytes, PROT_READ | PROT_WRITE);
    Range range;
    range.base = mapping + ticket.shift;
    range.bytes = ticket.bytes;
    range.kind = Kind::Imported;
    range.device = ticket.device;
    range.context = context;
    range.extent = extent;
    range.mapping = mapping;
    range.mapping_bytes = ticket.mapping_bytes;
    *pdptr = range.base;
    ranges().add(std::move(range));
  });
}

SOFTCUDA_API cuIpcCloseMemHandle(CUdeviceptr dptr) {
  return locked_call([&] {
    current_context();
    const Range *range = ranges().starting_at(dptr);
    require(range != nullptr && range->kind == Kind::Imported);
    give_up(range->mapping, range->mapping_bytes);
    ranges().remove(dptr);
  });
}
