// SPDX-License-Identifier: Apache-2.0
#ifndef SOFTCUDA_CAPTURE_H
#define SOFTCUDA_CAPTURE_H

#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "graph.h"
#include "stream.h"

namespace softcuda {

struct Capture {
  uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id thread;
  std::weak_ptr<Context> context;
  std::shared_ptr<Graph> graph;
  bool own_graph = true;  // false: the program's graph, captured into
  bool invalidated = false;
  Stream *origin = nullptr;
  std::set<Stream *> streams;           // every stream whose `capture` is this one
  std::vector<Dependency> left_behind;  // frontiers of streams that were destroyed meanwhile
};

// For calls that capture does not see (allocation, synchronisation, loading): refused where the modes say so, and
// the captures that forbid the call are lost.
void refuse_under_capture();

void invalidate(Capture &capture);

// True if work on the stream goes to a graph.  Fails if that capture was invalidated.
bool capturing(const Stream &stream);

// For calls that can never be part of a capture (synchronising with the stream).
void refuse_capturing(Stream &stream);

// Adds a node behind the stream's frontier and makes it the frontier.
std::shared_ptr<Node> capture_work(Stream &stream, Work work, Attributes attributes = {});

// The capture that recorded an event; null if it has ended.
std::shared_ptr<Capture> capture_of(const Event &event);

// cuStreamWaitEvent on an event that was recorded inside a capture: the stream joins it.
void join_capture(Stream &stream, const Event &event);

// A stream ends while a capture goes on.
void leave_capture(Stream &stream);

// Lets go of all streams of a capture and forgets it.
void end_capture(const std::shared_ptr<Capture> &capture);

}  // namespace softcuda

#endif  // SOFTCUDA_CAPTURE_H
