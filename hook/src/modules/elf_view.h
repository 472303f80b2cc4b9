// SPDX-License-Identifier: Apache-2.0
//
// As much of ELF64 as measuring a module image needs.  Offsets and counts are bounded by `limit` before they are used.
#ifndef FOUNDRYD_MODULES_ELF_VIEW_H
#define FOUNDRYD_MODULES_ELF_VIEW_H

#include <cstddef>

namespace foundryd::modules {

// Size of the file that starts at `data`, from its headers; 0 if it does not fit in `limit` or is not ELF64.
size_t elf_bytes(const std::byte *data, size_t limit);

}  // namespace foundryd::modules

#endif  // FOUNDRYD_MODULES_ELF_VIEW_H
