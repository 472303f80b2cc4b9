// SPDX-License-Identifier: Apache-2.0
//
// The table of hook.h.
#include <algorithm>

#include "foundryd/hook.h"
#include "interpose/concepts.h"
#include "interpose/lookup.h"
#include "memory/state.h"
#include "support/buffer.h"
#include "support/clock.h"
#include "support/counters.h"
#include "support/error.h"
#include "support/mode.h"

namespace foundryd {
namespace {

void get_last_error(fdy_error *out) {
  if (out) *out = last_error();
}

void free_buffer(fdy_buffer *buffer) {
  release_buffer(buffer);
}

int report(fdy_report *out) {
  return guard_api([&] {
    if (!out) throw Error(FDY_ERROR_INVALID, "out is NULL: give a place for the report");
    const clock::Spent spent = clock::spent();
    const memory::Space space = memory::Arenas::instance().space();
    *out = {.mode = static_cast<uint32_t>(mode()),
            .rows_installed = interpose::installed(),
            .contexts = contexts(),
            .reserved = 0,
            .arena_base = space.base,
            .arena_stride = space.base ? space.stride : 0,
            .engine = counters(Owner::engine),
            .communication = counters(Owner::communication),
            .driver_ns = spent.ns,
            .driver_calls = spent.calls};
  });
}

int time_driver(uint32_t on) {
  return guard_api([&] { clock::on.store(on != 0, std::memory_order_relaxed); });
}

int driver_enter() {
  return guard_api([] { clock::enter(); });
}

int driver_leave() {
  return guard_api([] {
    if (!clock::leave())
      throw Error(FDY_ERROR_STATE, "this thread leaves a driver call that it did not enter: call driver_enter first");
  });
}

fdy_hook make_table() {
  fdy_hook table{};
  table.abi = FDY_HOOK_ABI;
  table.bytes = sizeof table;
  table.last_error = get_last_error;
  table.free_buffer = free_buffer;
  table.report = report;
  table.time_driver = time_driver;
  table.driver_enter = driver_enter;
  table.driver_leave = driver_leave;
  memory::fill(table);
  modules::fill(table);
  graphs::fill(table);
  comm::fill(table);
  return table;
}

}  // namespace
}  // namespace foundryd

extern "C" __attribute__((visibility("default"))) const fdy_hook *fdy_hook_api(uint32_t abi) {
  static const fdy_hook table = foundryd::make_table();
  return abi == FDY_HOOK_ABI ? &table : nullptr;
}
