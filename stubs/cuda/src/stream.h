// SPDX-License-Identifier: Apache-2.0
#ifndef SOFTCUDA_STREAM_H
#define SOFTCUDA_STREAM_H

#include <map>
#include <memory>
#include <vector>

#include "process.h"

namespace softcuda {

// What the next captured node of a stream will depend on.
struct Dependency {
  std::shared_ptr<Node> node;
  CUgraphEdgeData data{};
};

struct Stream {
  std::weak_ptr<Context> context;
  std::shared_ptr<Queue> queue;
  unsigned flags = CU_STREAM_DEFAULT;
  int priority = 0;
  uint64_t id = 0;
  bool legacy = false;
  std::map<CUlaunchAttributeID, CUlaunchAttributeValue> attributes;

  std::shared_ptr<Capture> capture;
  std::vector<Dependency> frontier;
  // What cuStreamGetCaptureInfo last handed out: valid until the next call on the stream.
  std::vector<CUgraphNode> shown_nodes;
  std::vector<CUgraphEdgeData> shown_edges;

  bool blocking() const { return (flags & CU_STREAM_NON_BLOCKING) == 0; }
};

inline constexpr int kLeastPriority = 0;
inline constexpr int kGreatestPriority = -5;

std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context> &context, unsigned flags, int priority);

// Resolves a handle, the null and per-thread handles included, in the calling thread's context.  Using the null
// stream while a blocking stream is captured would order work across the capture: that fails, and ends the capture.
std::shared_ptr<Stream> resolve_stream(CUstream handle);
// The stream of calls that name none.
std::shared_ptr<Stream> default_stream();

// Puts a task behind the stream's work, and behind the work that the null stream's rules order before it.
Mark enqueue(Stream &stream, Queue::Task task);

// The same points without a task of one's own: all that a synchronisation with the stream waits for.
std::vector<Mark> pending_work(const Stream &stream);

}  // namespace softcuda

#endif  // SOFTCUDA_STREAM_H
