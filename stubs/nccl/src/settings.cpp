// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <cmath>
#include <cstdlib>
#include <string_view>

namespace ncclstub {
namespace {

// The whole text as a number, or NaN.
double number(const char *text) {
  char *end = nullptr;
  const double value = std::strtod(text, &end);
  return end == text || *end != '\0' ? std::nan("") : value;
}

Settings read_environment() {
  Settings out;
  if (const char *text = std::getenv("FOUNDRYD_NCCL_VERSION"); text != nullptr && *text != '\0') {
    const double value = number(text);
    if (value >= 22703 && value <= 23099 && value == std::floor(value)) {
      out.version = static_cast<int>(value);
    } else {
      out.problem =
          std::string("FOUNDRYD_NCCL_VERSION is '") + text + "', not a version from 22703 to 23099: correct it";
    }
  }
  if (const char *text = std::getenv("FOUNDRYD_NCCL_TIMEOUT"); text != nullptr && *text != '\0') {
    const double value = number(text);
    if (value > 0 && value <= 1e6) {
      out.timeout_ns = static_cast<uint64_t>(value * 1e9);
    } else {
      out.problem = std::string("FOUNDRYD_NCCL_TIMEOUT is '") + text + "', not a number of seconds above 0: correct it";
    }
  }
  if (const char *text = std::getenv("NCCL_GRAPH_MIXING_SUPPORT")) out.graph_mixing = std::string_view(text) != "0";
  if (const char *text = std::getenv("FOUNDRYD_LOG")) {
    const std::string_view level = text;
    if (level == "debug") out.log_level = 0;
    if (level == "info") out.log_level = 1;
    if (level == "error") out.log_level = 3;
  }
  return out;
}

}  // namespace

const Settings &settings() {
  static const Settings value = read_environment();
  return value;
}

ncclResult_t check_settings() {
  if (settings().problem.empty()) return ncclSuccess;
  return fail(ncclInvalidArgument, "%s", settings().problem.c_str());
}

}  // namespace ncclstub
