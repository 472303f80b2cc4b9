// SPDX-License-Identifier: Apache-2.0
#ifndef FOUNDRYD_HOOK_GRAPHS_CAPTURE_MODE_H
#define FOUNDRYD_HOOK_GRAPHS_CAPTURE_MODE_H

#include "support/driver.h"

namespace foundryd::graphs {

// Lets the calling thread make calls that another thread's capture would forbid (loading a module, say).
class RelaxedCapture {
 public:
  RelaxedCapture() { FDY_CU(cuThreadExchangeStreamCaptureMode, &mode_); }
  ~RelaxedCapture() { FDY_CU_RESULT(cuThreadExchangeStreamCaptureMode, &mode_); }
  RelaxedCapture(const RelaxedCapture &) = delete;
  RelaxedCapture &operator=(const RelaxedCapture &) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // exchanged: afterwards the one before
};

}  // namespace foundryd::graphs

#endif  // FOUNDRYD_HOOK_GRAPHS_CAPTURE_MODE_H
