// SPDX-License-Identifier: Apache-2.0
#include "memory/windows.h"

#include <pthread.h>

#include <array>
#include <iterator>
#include <new>

#include "memory/ipc_transport.h"
#include "memory/state.h"
#include "support/captures.h"
#include "support/driver.h"
#include "support/mode.h"

namespace foundryd::memory {
namespace {

using Long = unsigned long long;

constexpr uint64_t kUserSpace = 1ull << 47;

// A device arena's part of a window, in eighths.
struct Part {
  uint32_t begin, width;
};
constexpr std::array<Part, FDY_ARENA_HOST> kParts{{{0, 2}, {2, 2}, {4, 2}, {6, 1}, {7, 1}}};

uint64_t eighths(const Space &space, uint32_t count) {
  return round_down(space.stride / 8, kGranule) * count;
}

}  // namespace

Extent window_of(const Space &space, uint32_t rank) {
  if (rank >= kWindows)
    throw Error(FDY_ERROR_UNSUPPORTED, "rank %u has no window, only ranks 0 to %u have: IPC is for ranks below that",
                rank, kWindows - 1);
  const uint64_t first = space.base + space.bytes();
  if (first > kUserSpace || space.stride > (kUserSpace - first) / (rank + 1))
    throw Error(FDY_ERROR_MEMORY,
                "the window of rank %u does not fit behind the arenas at 0x%llx with stride 0x%llx: capture with a "
                "lower FOUNDRYD_ARENA_BASE or a smaller FOUNDRYD_ARENA_STRIDE",
                rank, static_cast<Long>(space.base), static_cast<Long>(space.stride));
  return {first + rank * space.stride, space.stride};
}

Extent window_extent(const Space &space, uint32_t rank, Extent extent) {
  const Extent window = window_of(space, rank);
  const uint64_t arena = space.contains(extent.base) ? (extent.base - space.base) / space.stride : FDY_ARENA_HOST;
  if (arena >= FDY_ARENA_HOST || extent.base % kGranule || extent.bytes % kGranule || extent.bytes == 0)
    throw Error(FDY_ERROR_INVALID, "%llu bytes at 0x%llx are no device memory of an arena: exchange handles again",
                static_cast<Long>(extent.bytes), static_cast<Long>(extent.base));
  const uint64_t offset = extent.base - space.begin_of(static_cast<uint32_t>(arena));
  const uint64_t room = eighths(space, kParts[arena].width);
  if (offset > room || extent.bytes > room - offset)
    throw Error(FDY_ERROR_UNSUPPORTED,
                "%llu bytes at 0x%llx lie beyond the first %llu of arena %u, which are all that a window shows: raise "
                "FOUNDRYD_ARENA_STRIDE and capture again",
                static_cast<Long>(extent.bytes), static_cast<Long>(extent.base), static_cast<Long>(room),
                static_cast<unsigned>(arena));
  return {window.base + eighths(space, kParts[arena].begin) + offset, extent.bytes};
}

Windows &Windows::instance() {
  // Never destroyed: see Arenas::instance.
  alignas(Windows) static unsigned char storage[sizeof(Windows)];
  static Windows *const windows = [] {
    auto *made = new (storage) Windows;
    pthread_atfork(nullptr, nullptr, [] { new (&instance().lock_) std::mutex; });
    return made;
  }();
  return *windows;
}

Windows::Source Windows::source_of(const ipc::Ticket &ticket, const ipc::Identity &self, const Space &space) {
  const ipc::Identity &exporter = ticket.exporter;
  if (exporter.process == self.process) {
    const bool own = exporter.rank == self.rank;
    if (!own && !capturing())
      throw Error(FDY_ERROR_STATE,
                  "the handle stands for rank %u and was made by this process, rank %u, which is for a capture without "
                  "peers: exchange handles with the real one",
                  exporter.rank, self.rank);
    auto shared = Arenas::instance().share(ticket.address, ticket.serial);
    if (!shared)
      throw Error(FDY_ERROR_INVALID, "the memory at 0x%llx has been freed since its handle was made: make a new one",
                  static_cast<Long>(ticket.address));
    if (own) return {std::move(shared->memory), shared->mapped, false};
    return {Arenas::instance().create(shared->mapped.extent.bytes), shared->mapped, true};
  }
  if (capturing())
    throw Error(FDY_ERROR_STATE,
                "the handle is of rank %u in process %d, and a capture has no peers: make it from this process's own "
                "with ipc_peer_handle",
                exporter.rank, exporter.pid);
  if (exporter.group != self.group)
    throw Error(FDY_ERROR_INVALID,
                "the handle is of rank %u in process %d, which is of another FOUNDRYD_GROUP: start all ranks with one",
                exporter.rank, exporter.pid)
        .answered_with(CUDA_ERROR_NOT_PERMITTED);
  if (exporter.rank == self.rank)
    throw Error(FDY_ERROR_INVALID, "process %d says it is rank %u, as this one is: set RANK in each rank", exporter.pid,
                self.rank);
  const ipc::Fetched fetched = ipc::fetch(ticket, space);
  CUmemGenericAllocationHandle handle = 0;
  void *const descriptor = reinterpret_cast<void *>(static_cast<intptr_t>(fetched.descriptor.get()));
  FDY_CU(cuMemImportFromShareableHandle, &handle, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  return {Memory(handle), fetched.mapped, false};
}

uint64_t Windows::open(const ipc::Ticket &ticket) {
  const ipc::Identity self = ipc::identity();
  const Space space = Arenas::instance().space();
  if (space.base == 0)
    throw Error(FDY_ERROR_STATE, "the arenas of this process are not where they must be: see its log, then restart it");
  window_of(space, ticket.exporter.rank);
  const CurrentContext current;
  const RelaxedCapture relaxed;
  settle();
  Source source = source_of(ticket, self, space);
  const Extent extent = source.mapped.extent;
  if (ticket.address < extent.base || ticket.address - extent.base > extent.bytes ||
      ticket.bytes > extent.bytes - (ticket.address - extent.base))
    throw Error(FDY_ERROR_INVALID,
                "the handle's %llu bytes at 0x%llx are not in the memory it came with: it is damaged",
                static_cast<Long>(ticket.bytes), static_cast<Long>(ticket.address));
  std::lock_guard guard(lock_);
  Mapping &mapping = map_locked(ticket, space, std::move(source));
  const uint64_t address = mapping.extent.base + (ticket.address - extent.base);
  auto [at, fresh] = opened_.try_emplace(address, Opened{.bytes = ticket.bytes,
                                                         .origin = ticket.address,
                                                         .process = ticket.exporter.process,
                                                         .serial = ticket.serial,
                                                         .mapping = mapping.extent.base,
                                                         .id = ids_ + 1,
                                                         .rank = ticket.exporter.rank,
                                                         .times = 0});
  if (fresh) {
    ++ids_;
    ++mapping.users;
  } else if (at->second.serial != ticket.serial) {
    throw Error(FDY_ERROR_STATE,
                "the window of rank %u still has an allocation at 0x%llx that the rank has freed: close it first",
                ticket.exporter.rank, static_cast<Long>(address));
  }
  ++at->second.times;
  return address;
}

// Mapped already, by another allocation that shares the memory, or mapped now.
Windows::Mapping &Windows::map_locked(const ipc::Ticket &ticket, const Space &space, Source source) {
  const Extent extent = window_extent(space, ticket.exporter.rank, source.mapped.extent);
  auto next = mappings_.lower_bound(extent.base);
  if (next != mappings_.end() && next->first == extent.base && next->second.extent.bytes == extent.bytes &&
      next->second.process == ticket.exporter.process && next->second.number == source.mapped.number)
    return next->second;
  const bool before = next != mappings_.begin() && std::prev(next)->second.extent.end() > extent.base;
  if (before || (next != mappings_.end() && next->first < extent.end()))
    throw Error(FDY_ERROR_STATE,
                "the window of rank %u still shows memory at 0x%llx that the rank has freed, or that was of a process "
                "before it: close it first",
                ticket.exporter.rank, static_cast<Long>(extent.base));
  if (source.stand_in && captures::any())
    throw Error(FDY_ERROR_STATE, "a stand-in for rank %u cannot be cleared while a stream is captured: open it before",
                ticket.exporter.rank)
        .answered_with(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  CUdevice device = 0;
  FDY_CU(cuCtxGetDevice, &device);
  reserve_locked(space, ticket.exporter.rank);
  const Mapping made{extent, ticket.exporter.process, source.mapped.number, 0};
  Mapping &mapping = mappings_.emplace_hint(next, extent.base, made)->second;
  try {
    map_memory(extent, source.memory, device);
  } catch (...) {
    mappings_.erase(extent.base);
    throw;
  }
  if (source.stand_in) {
    // Warm-up kernels read it.  A mapping without users goes with the next call if this fails.
    FDY_CU(cuMemsetD8_v2, extent.base, 0, extent.bytes);
    FDY_CU(cuCtxSynchronize);
  }
  return mapping;
}

void Windows::reserve_locked(const Space &space, uint32_t rank) {
  const uint64_t bit = 1ull << rank;
  if (reserved_.load(std::memory_order_relaxed) & bit) return;
  const Extent window = window_of(space, rank);
  const auto [result, got] = reserve_exactly(window);
  if (result != CUDA_SUCCESS || got != window.base) {
    throw Error(
        FDY_ERROR_MEMORY,
        "the window of rank %u came out at 0x%llx (CUresult %d) and not at 0x%llx, so something else lies there: "
        "set FOUNDRYD_ARENA_BASE to another address and capture again",
        rank, static_cast<Long>(got), static_cast<int>(result), static_cast<Long>(window.base));
  }
  space_ = space;
  reserved_.fetch_or(bit, std::memory_order_release);
}

// Unmaps what nobody uses any more, once the device is through with it.
CUresult Windows::settle() noexcept {
  if (captures::any()) return CUDA_SUCCESS;
  {
    std::lock_guard guard(lock_);
    bool unused = false;
    for (const auto &[base, mapping] : mappings_) unused |= mapping.users == 0;
    if (!unused) return CUDA_SUCCESS;
  }
  const CUresult synchronised = FDY_CU_RESULT(cuCtxSynchronize);
  std::lock_guard guard(lock_);
  unmap_unused_locked();
  return synchronised;
}

void Windows::unmap_unused_locked() noexcept {
  for (auto at = mappings_.begin(); at != mappings_.end();) {
    if (at->second.users == 0 &&
        FDY_CU_RESULT(cuMemUnmap, at->second.extent.base, at->second.extent.bytes) == CUDA_SUCCESS)
      at = mappings_.erase(at);
    else
      ++at;
  }
}

CUresult Windows::close(uint64_t address) {
  const CurrentContext current;
  const RelaxedCapture relaxed;
  {
    std::lock_guard guard(lock_);
    auto at = opened_.find(address);
    if (at == opened_.end()) return CUDA_ERROR_INVALID_VALUE;
    if (--at->second.times > 0) return CUDA_SUCCESS;
    --mappings_.at(at->second.mapping).users;
    opened_.erase(at);
  }
  return settle();
}

bool Windows::contains(uint64_t address) const noexcept {
  const uint64_t reserved = reserved_.load(std::memory_order_acquire);
  if (reserved == 0 || forked_with_contexts()) return false;
  const uint64_t first = space_.base + space_.bytes();
  if (address < first) return false;
  const uint64_t rank = (address - first) / space_.stride;
  return rank < kWindows && (reserved >> rank & 1);
}

std::optional<Windows::Found> Windows::find(uint64_t address) noexcept {
  if (!contains(address)) return std::nullopt;
  std::lock_guard guard(lock_);
  auto at = opened_.upper_bound(address);
  if (at == opened_.begin()) return std::nullopt;
  --at;
  if (address - at->first >= at->second.bytes) return std::nullopt;
  return Found{at->first, at->second.bytes, at->second.id};
}

std::vector<fdy_window> Windows::list() {
  Arenas::refuse_after_fork();
  std::lock_guard guard(lock_);
  std::vector<fdy_window> out;
  out.reserve(opened_.size());
  for (const auto &[address, one] : opened_)
    out.push_back({.address = address, .bytes = one.bytes, .origin = one.origin, .rank = one.rank, .reserved = 0});
  return out;
}

}  // namespace foundryd::memory
