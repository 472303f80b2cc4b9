// SPDX-License-Identifier: Apache-2.0
#include "memory/arenas.h"

#include "memory/foreign.h"
#include "memory/state.h"
#include "support/driver.h"

namespace foundryd::memory {
namespace {

constexpr uint8_t kDepth = 31;

struct Selection {
  uint8_t depth;
  uint8_t arenas[kDepth];
};
constinit thread_local Selection selection{};

}  // namespace

void push_arena(uint32_t arena) {
  if (arena >= FDY_ARENA_COUNT)
    throw Error(FDY_ERROR_INVALID, "there is no arena %u, only 0 to %d: see fdy_arena", arena, FDY_ARENA_COUNT - 1);
  if (selection.depth == kDepth)
    throw Error(FDY_ERROR_INVALID, "arenas are selected %d deep on this thread, the most there can be: pop some",
                kDepth);
  selection.arenas[selection.depth++] = static_cast<uint8_t>(arena);
}

void pop_arena() {
  if (selection.depth == 0)
    throw Error(FDY_ERROR_STATE, "no arena is selected on this thread: each pop needs a push of its own");
  --selection.depth;
}

ArenaScope::~ArenaScope() {
  if (selection.depth > 0) --selection.depth;
}

// HOST says nothing about device memory, which then goes where it would have gone.
fdy_arena selected_arena() noexcept {
  for (uint8_t i = selection.depth; i-- > 0;)
    if (selection.arenas[i] != FDY_ARENA_HOST) return static_cast<fdy_arena>(selection.arenas[i]);
  return FDY_ARENA_DEFAULT;
}

std::optional<Place> classify(uint64_t address) noexcept {
  const auto found = Arenas::instance().find(address);
  return found ? std::optional(found->first) : std::nullopt;
}

bool is_live_arena_range(uint64_t address, uint64_t bytes) noexcept {
  const auto place = classify(address);
  return place && bytes <= place->bytes - place->offset;
}

bool in_arena_space(uint64_t address) noexcept {
  return Arenas::instance().contains(address);
}

bool has_foreign_memory() noexcept {
  return foreign::any();
}

const char *foreign_memory(uint64_t address, uint64_t bytes) noexcept {
  const foreign::Kind kind = foreign::touched(address, bytes);
  return kind == foreign::Kind::none ? nullptr : foreign::name(kind);
}

bool is_texture_or_surface(uint64_t word) noexcept {
  return foreign::is_object(word);
}

CurrentContext::CurrentContext() {
  CUcontext current = nullptr;
  if (FDY_CU_RESULT(cuCtxGetCurrent, &current) == CUDA_SUCCESS && current) return;
  current = Arenas::instance().context();
  if (!current) throw Error(FDY_ERROR_STATE, "the process has no CUDA context yet: make one first");
  FDY_CU(cuCtxPushCurrent_v2, current);
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  if (pushed_) FDY_CU_RESULT(cuCtxPopCurrent_v2, &popped);
}

}  // namespace foundryd::memory
