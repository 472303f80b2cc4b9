// SPDX-License-Identifier: Apache-2.0
//
// Concepts that this build does not have are empty: their entries of the table answer FDY_ERROR_STATE.
#include "interpose/concepts.h"

namespace foundryd {

namespace modules {
__attribute__((weak)) std::span<const Row> rows() {
  return {};
}
__attribute__((weak)) void fill(fdy_hook &) {}
}  // namespace modules
namespace graphs {
__attribute__((weak)) std::span<const Row> rows() {
  return {};
}
__attribute__((weak)) void fill(fdy_hook &) {}
}  // namespace graphs
namespace comm {
__attribute__((weak)) std::span<const Row> rows() {
  return {};
}
__attribute__((weak)) void fill(fdy_hook &) {}
}  // namespace comm

}  // namespace foundryd
