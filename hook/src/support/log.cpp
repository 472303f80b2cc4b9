// SPDX-License-Identifier: Apache-2.0
#include "support/log.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace foundryd {

void warn(const char *format, ...) noexcept {
  const char *level = std::getenv("FOUNDRYD_LOG");
  if (level && !std::strcmp(level, "error")) return;
  char line[640] = "foundryd hook: ";
  const size_t prefix = std::strlen(line);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line + prefix, sizeof line - prefix - 1, format, arguments);
  va_end(arguments);
  const size_t length = std::strlen(line);
  line[length] = '\n';
  // One write, so that lines of several ranks do not mix.  Nothing useful could be done about a failure.
  if (write(STDERR_FILENO, line, length + 1) < 0) return;
}

}  // namespace foundryd
