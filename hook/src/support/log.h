// SPDX-License-Identifier: Apache-2.0
#ifndef FOUNDRYD_HOOK_SUPPORT_LOG_H
#define FOUNDRYD_HOOK_SUPPORT_LOG_H

namespace foundryd {

// One line on stderr, where an error is first decided.  FOUNDRYD_LOG=error silences warnings.
void warn(const char *format, ...) noexcept __attribute__((format(printf, 1, 2)));

}  // namespace foundryd

#endif  // FOUNDRYD_HOOK_SUPPORT_LOG_H
