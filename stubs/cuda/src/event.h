// SPDX-License-Identifier: Apache-2.0
#ifndef SOFTCUDA_EVENT_H
#define SOFTCUDA_EVENT_H

#include <memory>
#include <vector>

#include "stream.h"

namespace softcuda {

struct Event {
  std::weak_ptr<Context> context;
  unsigned flags = 0;
  std::shared_ptr<Fence> fence;  // of the last record outside a capture; null if there was none

  // The last record was inside a capture: what a wait on the event depends on.
  bool captured = false;
  std::weak_ptr<Capture> capture;
  std::vector<Dependency> dependencies;
};

void record_event(const std::shared_ptr<Event> &event, Stream &stream);

}  // namespace softcuda

#endif  // SOFTCUDA_EVENT_H
