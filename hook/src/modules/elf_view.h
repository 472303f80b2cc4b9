// SPDX-License-Identifier: Apache-2.0
//
// As much of ELF64 as module images need.  Offsets and counts are bounded by `limit` before they are used.
#ifndef FOUNDRYD_MODULES_ELF_VIEW_H
#define FOUNDRYD_MODULES_ELF_VIEW_H

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace foundryd::modules {

// Size of the file that starts at `data`, from its headers; 0 if it does not fit in `limit` or is not ELF64.
size_t elf_bytes(const std::byte *data, size_t limit);

// Appends the names of variables in writable memory.  False if the file has no symbol table or cannot be read.
bool collect_variables(std::span<const std::byte> file, std::vector<std::string> &names);

}  // namespace foundryd::modules

#endif  // FOUNDRYD_MODULES_ELF_VIEW_H
