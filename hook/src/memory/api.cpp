// SPDX-License-Identifier: Apache-2.0
//
// The memory part of the fdy_hook table.
#include <cstring>

#include "interpose/concepts.h"
#include "memory/ipc_handle.h"
#include "memory/rows.h"
#include "memory/windows.h"
#include "support/buffer.h"

namespace foundryd::memory {
namespace {

void require(const void *argument, const char *name) {
  if (!argument) throw Error(FDY_ERROR_INVALID, "%s is NULL: give a place for the answer", name);
}

int arena_push(uint32_t arena) {
  return guard_api([&] { push_arena(arena); });
}

int arena_pop() {
  return guard_api([] { pop_arena(); });
}

int set_layout(const fdy_layout *layout) {
  return guard_api([&] {
    require(layout, "layout");
    Arenas::instance().set_layout(*layout);
  });
}

int allocations(fdy_buffer *out) {
  return guard_api([&] {
    require(out, "out");
    fill_buffer(out, Arenas::instance().allocations());
  });
}

int divergence(fdy_divergence *out) {
  return guard_api([&] {
    require(out, "out");
    *out = Arenas::instance().divergence();
  });
}

int map_held() {
  return guard_api([] { Arenas::instance().map_held(); });
}

int release_held() {
  return guard_api([] { Arenas::instance().release_held(); });
}

// The host arena's addresses are the program's own memory.
bool on_host(uint64_t address, uint64_t bytes) {
  const auto place = classify(address);
  return place && place->arena == FDY_ARENA_HOST && bytes <= place->bytes - place->offset;
}

int upload(uint64_t address, const void *data, uint64_t bytes) {
  return guard_api([&] {
    if (bytes == 0) return;
    require(data, "data");
    if (on_host(address, bytes)) {
      std::memcpy(reinterpret_cast<void *>(address), data, bytes);
      return;
    }
    CurrentContext current;
    FDY_CU(cuMemcpyHtoD_v2, address, data, bytes);
  });
}

int download(uint64_t address, void *data, uint64_t bytes) {
  return guard_api([&] {
    if (bytes == 0) return;
    require(data, "data");
    if (on_host(address, bytes)) {
      std::memcpy(data, reinterpret_cast<const void *>(address), bytes);
      return;
    }
    CurrentContext current;
    FDY_CU(cuMemcpyDtoH_v2, data, address, bytes);
  });
}

int set_rank(uint32_t rank) {
  return guard_api([&] { ipc::set_rank(rank); });
}

int ipc_peer_handle(const void *own, uint32_t rank, void *out) {
  return guard_api([&] {
    require(own, "own");
    require(out, "out");
    CUipcMemHandle handle;
    std::memcpy(&handle, own, sizeof handle);
    handle = ipc::peer_handle(handle, rank);
    std::memcpy(out, &handle, sizeof handle);
  });
}

int windows(fdy_buffer *out) {
  return guard_api([&] {
    require(out, "out");
    fill_buffer(out, Windows::instance().list());
  });
}

}  // namespace

void fill(fdy_hook &table) {
  table.arena_push = arena_push;
  table.arena_pop = arena_pop;
  table.set_layout = set_layout;
  table.allocations = allocations;
  table.divergence = divergence;
  table.map_held = map_held;
  table.release_held = release_held;
  table.upload = upload;
  table.download = download;
  table.set_rank = set_rank;
  table.ipc_peer_handle = ipc_peer_handle;
  table.windows = windows;
}

}  // namespace foundryd::memory
