// SPDX-License-Identifier: Apache-2.0
#include "error.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <string>

#include "settings.h"

namespace ncclstub {
namespace {

std::mutex last_mutex;
std::string last_message;

std::string format_text(const char *format, va_list arguments) {
  char text[1024];
  std::vsnprintf(text, sizeof text, format, arguments);
  return text;
}

void write_line(int level, const std::string &text) {
  if (level < settings().log_level) return;
  std::fprintf(stderr, "foundryd nccl: %s\n", text.c_str());
}

}  // namespace

ncclResult_t fail(ncclResult_t result, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_text(format, arguments);
  va_end(arguments);
  write_line(2, text);
  const std::lock_guard lock(last_mutex);
  last_message = std::move(text);
  return result;
}

void log(int level, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_line(level, format_text(format, arguments));
  va_end(arguments);
}

const char *last_error() {
  thread_local std::string copy;
  const std::lock_guard lock(last_mutex);
  copy = last_message;
  return copy.c_str();
}

const char *result_name(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled CUDA error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process failed or did not answer";
    case ncclInProgress:
      return "operation in progress";
    case ncclTimeout:
      return "operation timed out";
  }
  return "unknown result code";
}

}  // namespace ncclstub
