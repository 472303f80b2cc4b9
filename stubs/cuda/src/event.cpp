// SPDX-License-Identifier: Apache-2.0
#include "event.h"

#include "capture.h"
#include "context.h"

namespace softcuda {

namespace {

constexpr unsigned kEventFlags = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;

// An event of a capture stands for no point in time that a host could wait for.
void refuse_captured(const Event &event) {
  if (!event.captured) return;
  const auto capture = capture_of(event);
  require(capture != nullptr);  // it has ended: the event stands for nothing at all
  invalidate(*capture);
  throw Failure{CUDA_ERROR_CAPTURED_EVENT};
}

void record(CUevent hEvent, CUstream hStream, unsigned flags) {
  require((flags & ~unsigned{CU_EVENT_RECORD_EXTERNAL}) == 0);
  const auto stream = resolve_stream(hStream);
  const auto event = process().events.get(hEvent);
  require(event->context.lock() == stream->context.lock(), CUDA_ERROR_INVALID_HANDLE);
  const bool captured = capturing(*stream);
  if (flags == CU_EVENT_RECORD_EXTERNAL) {
    require(captured, CUDA_ERROR_ILLEGAL_STATE);
    capture_work(*stream, RecordWork{event});
    return;
  }
  if (captured) {
    event->captured = true;
    event->capture = stream->capture;
    event->dependencies = stream->frontier;
    return;
  }
  record_event(event, *stream);
}

void wait_for(CUstream hStream, CUevent hEvent, unsigned flags) {
  require((flags & ~unsigned{CU_EVENT_WAIT_EXTERNAL}) == 0);
  const auto stream = resolve_stream(hStream);
  const auto event = process().events.get(hEvent);
  const bool captured = capturing(*stream);
  if (flags == CU_EVENT_WAIT_EXTERNAL) {
    require(captured, CUDA_ERROR_ILLEGAL_STATE);
    capture_work(*stream, WaitWork{event});
    return;
  }
  if (event->captured) {
    join_capture(*stream, *event);
    return;
  }
  if (event->fence == nullptr) return;  // never recorded: nothing to wait for, in a capture as outside
  if (captured) {
    // The event was recorded outside the capture: the graph would depend on something that it does not contain.
    invalidate(*stream->capture);
    throw Failure{CUDA_ERROR_STREAM_CAPTURE_ISOLATION};
  }
  enqueue(*stream, [fence = event->fence] { fence->wait(); });
}

}  // namespace

void record_event(const std::shared_ptr<Event> &event, Stream &stream) {
  auto fence = std::make_shared<Fence>();
  enqueue(stream, [fence] { fence->signal(); });
  event->fence = std::move(fence);
  event->captured = false;
  event->capture.reset();
  event->dependencies.clear();
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuEventCreate(CUevent *phEvent, unsigned int Flags) {
  return locked_call([&] {
    require(phEvent != nullptr && (Flags & ~kEventFlags) == 0);
    require((Flags & CU_EVENT_INTERPROCESS) == 0 || (Flags & CU_EVENT_DISABLE_TIMING) != 0);
    const auto context = current_context();
    const auto event = process().events.make();
    event->context = context;
    event->flags = Flags;
    *phEvent = Handles<Event, CUevent>::handle(event);
  });
}

SOFTCUDA_API cuEventDestroy_v2(CUevent hEvent) {
  return locked_call([&] { process().events.remove(process().events.get(hEvent).get()); });
}

SOFTCUDA_API cuEventRecord(CUevent hEvent, CUstream hStream) {
  return locked_call([&] { record(hEvent, hStream, CU_EVENT_RECORD_DEFAULT); });
}

SOFTCUDA_API cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags) {
  return locked_call([&] { record(hEvent, hStream, flags); });
}

SOFTCUDA_API cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
  return locked_call([&] { wait_for(hStream, hEvent, Flags); });
}

SOFTCUDA_API cuEventQuery(CUevent hEvent) {
  return locked_call([&] {
    const auto event = process().events.get(hEvent);
    refuse_captured(*event);
    refuse_under_capture();
    if (event->fence == nullptr) return;
    require(event->fence->done(), CUDA_ERROR_NOT_READY);
    if (const auto context = event->context.lock()) {
      require(context->fault->load() == CUDA_SUCCESS, context->fault->load());
    }
  });
}

SOFTCUDA_API cuEventSynchronize(CUevent hEvent) {
  return call([&] {
    std::shared_ptr<Fence> fence;
    std::shared_ptr<Context> context;
    {
      const Lock lock = lock_process();
      const auto event = process().events.get(hEvent);
      refuse_captured(*event);
      refuse_under_capture();
      fence = event->fence;
      context = event->context.lock();
    }
    if (fence == nullptr) return;
    fence->wait();
    if (context != nullptr) require(context->fault->load() == CUDA_SUCCESS, context->fault->load());
  });
}

namespace {

CUresult elapsed(float *milliseconds, CUevent start, CUevent end) {
  return locked_call([&] {
    require(milliseconds != nullptr);
    const auto first = process().events.get(start);
    const auto last = process().events.get(end);
    for (const auto &event : {first, last}) {
      refuse_captured(*event);
      require((event->flags & CU_EVENT_DISABLE_TIMING) == 0, CUDA_ERROR_INVALID_HANDLE);
      require(event->fence != nullptr, CUDA_ERROR_INVALID_HANDLE);
    }
    require(first->fence->done() && last->fence->done(), CUDA_ERROR_NOT_READY);
    *milliseconds =
        static_cast<float>(static_cast<double>(last->fence->nanoseconds() - first->fence->nanoseconds()) * 1e-6);
  });
}

}  // namespace

SOFTCUDA_API cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd) {
  return elapsed(pMilliseconds, hStart, hEnd);
}

SOFTCUDA_API cuEventElapsedTime_v2(float *pMilliseconds, CUevent hStart, CUevent hEnd) {
  return elapsed(pMilliseconds, hStart, hEnd);
}
