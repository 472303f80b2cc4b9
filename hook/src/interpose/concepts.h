// SPDX-License-Identifier: Apache-2.0
//
// What each concept gives to the whole: its rows, and its part of the fdy_hook table.  Adding a concept is a line here
// and a line in table.cpp and api.cpp.
#ifndef FOUNDRYD_HOOK_INTERPOSE_CONCEPTS_H
#define FOUNDRYD_HOOK_INTERPOSE_CONCEPTS_H

#include <span>

#include "foundryd/hook.h"
#include "interpose/table.h"

namespace foundryd {

namespace interpose {
std::span<const Row> rows();  // cuGetProcAddress itself
}
namespace memory {
std::span<const Row> device_rows();
std::span<const Row> ordered_rows();
std::span<const Row> host_rows();
std::span<const Row> query_rows();
std::span<const Row> ipc_rows();
std::span<const Row> vmm_rows();
std::span<const Row> texture_rows();
void fill(fdy_hook &table);
}  // namespace memory
namespace modules {
std::span<const Row> rows();
void fill(fdy_hook &table);
}  // namespace modules
namespace graphs {
std::span<const Row> rows();
void fill(fdy_hook &table);
}  // namespace graphs
namespace comm {
std::span<const Row> rows();
void fill(fdy_hook &table);
}  // namespace comm

}  // namespace foundryd

#endif  // FOUNDRYD_HOOK_INTERPOSE_CONCEPTS_H
