// SPDX-License-Identifier: Apache-2.0
//
// What the environment tells the stubs, read once.
#ifndef NCCLSTUB_SETTINGS_H
#define NCCLSTUB_SETTINGS_H

#include <cstdint>
#include <string>

#include "error.h"

namespace ncclstub {

struct Settings {
  int version = 22809;                   // FOUNDRYD_NCCL_VERSION: what ncclGetVersion answers, 22703 to 23099
  uint64_t timeout_ns = 60'000'000'000;  // FOUNDRYD_NCCL_TIMEOUT in seconds: how long a rank waits for another
  bool graph_mixing = true;              // NCCL_GRAPH_MIXING_SUPPORT
  int log_level = 2;                     // FOUNDRYD_LOG: debug 0, info 1, warning 2, error 3
  std::string problem;                   // "" or why the above cannot be used
};

const Settings &settings();

// Fails with the problem of the environment, if there is one.
ncclResult_t check_settings();

}  // namespace ncclstub

#endif  // NCCLSTUB_SETTINGS_H
