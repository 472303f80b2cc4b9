// SPDX-License-Identifier: Apache-2.0
//
// Whether another image is, to whoever loads it, the one that a module was loaded from.
#ifndef FOUNDRYD_HOOK_MODULES_COMPARE_H
#define FOUNDRYD_HOOK_MODULES_COMPARE_H

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>

namespace foundryd::modules {

// Loads both as the module was loaded, looks at these functions and globals (and at globals that the program asked
// for), and unloads them.  Says the first difference as the end of a sentence that begins with the image; empty if
// there is none.
std::string image_difference(uint32_t module, std::span<const std::byte> image, const std::set<std::string> &functions,
                             const std::set<std::string> &globals);

}  // namespace foundryd::modules

#endif  // FOUNDRYD_HOOK_MODULES_COMPARE_H
