// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <algorithm>
#include <cstring>

#include "capture.h"
#include "context.h"

namespace softcuda {

namespace {

// Marks of the work that the null stream's rules order before the next task on a stream.
std::vector<Mark> null_stream_order(const Stream &stream) {
  std::vector<Mark> before;
  if (!stream.blocking()) return before;
  const auto context = stream.context.lock();
  require(context != nullptr, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  const auto add = [&](const Stream &other) {
    if (Mark mark = other.queue->tail(); mark.queue != nullptr) before.push_back(std::move(mark));
  };
  if (stream.legacy) {
    for (const auto &other : context->streams) {
      if (other->blocking()) add(*other);
    }
  } else if (context->legacy != nullptr) {
    add(*context->legacy);
  }
  return before;
}

void refuse_implicit_order(const Context &context) {
  for (const auto &capture : process().captures) {
    if (capture->context.lock().get() != &context) continue;
    const bool blocking = std::any_of(capture->streams.begin(), capture->streams.end(),
                                      [](const Stream *stream) { return stream->blocking(); });
    if (!blocking) continue;
    invalidate(*capture);
    throw Failure{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT};
  }
}

std::shared_ptr<Stream> per_thread_stream() {
  const auto context = current_context();
  auto &own = this_thread().own_streams[context->id];
  if (own == nullptr || context->streams.count(own) == 0) {
    own = make_stream(context, CU_STREAM_DEFAULT, kLeastPriority);
  }
  return own;
}

// A stream whose capture status may be asked without harm.
std::shared_ptr<Stream> stream_at(CUstream handle) {
  const bool null = handle == nullptr;
  if (handle == CU_STREAM_PER_THREAD || (null && this_thread().per_thread_default_stream)) return per_thread_stream();
  if (null || handle == CU_STREAM_LEGACY) return current_context()->legacy;
  auto stream = process().streams.get(handle);
  const auto context = stream->context.lock();
  require(context != nullptr && context->active, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  const CUresult fault = context->fault->load();
  require(fault == CUDA_SUCCESS, fault);
  return stream;
}

int clamp_priority(int priority) {
  return std::clamp(priority, kGreatestPriority, kLeastPriority);
}

}  // namespace

std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context> &context, unsigned flags, int priority) {
  auto stream = process().streams.make();
  stream->context = context;
  stream->queue = std::make_shared<Queue>(context->fault);
  stream->flags = flags;
  stream->priority = clamp_priority(priority);
  stream->id = process().next_id++;
  context->streams.insert(stream);
  return stream;
}

std::shared_ptr<Stream> resolve_stream(CUstream handle) {
  auto stream = stream_at(handle);
  if (stream->legacy) refuse_implicit_order(*stream->context.lock());
  return stream;
}

std::shared_ptr<Stream> default_stream() {
  return resolve_stream(nullptr);
}

Mark enqueue(Stream &stream, Queue::Task task) {
  return stream.queue->submit_after(null_stream_order(stream), std::move(task));
}

std::vector<Mark> pending_work(const Stream &stream) {
  std::vector<Mark> marks = null_stream_order(stream);
  if (Mark mark = stream.queue->tail(); mark.queue != nullptr) marks.push_back(std::move(mark));
  return marks;
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority) {
  return locked_call([&] {
    require(phStream != nullptr && (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) == 0);
    *phStream = Handles<Stream, CUstream>::handle(make_stream(current_context(), flags, priority));
  });
}

SOFTCUDA_API cuStreamCreate(CUstream *phStream, unsigned int Flags) {
  return locked_call([&] {
    require(phStream != nullptr && (Flags & ~unsigned{CU_STREAM_NON_BLOCKING}) == 0);
    *phStream = Handles<Stream, CUstream>::handle(make_stream(current_context(), Flags, kLeastPriority));
  });
}

SOFTCUDA_API cuStreamDestroy_v2(CUstream hStream) {
  return locked_call([&] {
    const auto stream = process().streams.get(hStream);
    leave_capture(*stream);
    stream->queue->close();
    if (const auto context = stream->context.lock()) context->streams.erase(stream);
    process().streams.remove(stream.get());
  });
}

SOFTCUDA_API cuStreamQuery(CUstream hStream) {
  return locked_call([&] {
    const auto stream = resolve_stream(hStream);
    refuse_capturing(*stream);
    refuse_under_capture();
    for (const Mark &mark : pending_work(*stream)) require(mark.done(), CUDA_ERROR_NOT_READY);
  });
}

SOFTCUDA_API cuStreamSynchronize(CUstream hStream) {
  return call([&] {
    std::vector<Mark> marks;
    std::shared_ptr<Fault> fault;
    {
      const Lock lock = lock_process();
      const auto stream = resolve_stream(hStream);
      refuse_capturing(*stream);
      refuse_under_capture();
      marks = pending_work(*stream);
      fault = stream->context.lock()->fault;
    }
    wait_all(marks);
    require(fault->load() == CUDA_SUCCESS, fault->load());
  });
}

SOFTCUDA_API cuStreamGetPriority(CUstream hStream, int *priority) {
  return locked_call([&] {
    require(priority != nullptr);
    *priority = stream_at(hStream)->priority;
  });
}

SOFTCUDA_API cuStreamGetFlags(CUstream hStream, unsigned int *flags) {
  return locked_call([&] {
    require(flags != nullptr);
    *flags = stream_at(hStream)->flags;
  });
}

SOFTCUDA_API cuStreamGetId(CUstream hStream, unsigned long long *streamId) {
  return locked_call([&] {
    require(streamId != nullptr);
    *streamId = stream_at(hStream)->id;
  });
}

SOFTCUDA_API cuStreamGetDevice(CUstream hStream, CUdevice *device) {
  return locked_call([&] {
    require(device != nullptr);
    *device = stream_at(hStream)->context.lock()->device;
  });
}

SOFTCUDA_API cuStreamGetCtx(CUstream hStream, CUcontext *pctx) {
  return locked_call([&] {
    require(pctx != nullptr);
    *pctx = Handles<Context, CUcontext>::handle(stream_at(hStream)->context.lock());
  });
}

SOFTCUDA_API cuStreamGetCtx_v2(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx) {
  return locked_call([&] {
    require(pCtx != nullptr);
    *pCtx = Handles<Context, CUcontext>::handle(stream_at(hStream)->context.lock());
    if (pGreenCtx != nullptr) *pGreenCtx = nullptr;
  });
}

SOFTCUDA_API cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value_out) {
  return locked_call([&] {
    require(value_out != nullptr);
    const auto stream = stream_at(hStream);
    if (attr == CU_LAUNCH_ATTRIBUTE_PRIORITY) {
      value_out->priority = stream->priority;
      return;
    }
    CUstreamAttrValue value{};
    if (attr == CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY) value.syncPolicy = CU_SYNC_POLICY_AUTO;
    if (attr == CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP) value.memSyncDomainMap = {0, 1};
    if (const auto it = stream->attributes.find(attr); it != stream->attributes.end()) value = it->second;
    switch (attr) {
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
        value_out->accessPolicyWindow = value.accessPolicyWindow;
        return;
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
        value_out->syncPolicy = value.syncPolicy;
        return;
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
        value_out->memSyncDomainMap = value.memSyncDomainMap;
        return;
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
        value_out->memSyncDomain = value.memSyncDomain;
        return;
      default:
        throw Failure{CUDA_ERROR_INVALID_VALUE};
    }
  });
}

SOFTCUDA_API cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value) {
  return locked_call([&] {
    require(value != nullptr);
    const auto stream = stream_at(hStream);
    switch (attr) {
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        stream->priority = clamp_priority(value->priority);
        return;
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
        stream->attributes[attr] = *value;
        return;
      default:
        throw Failure{CUDA_ERROR_INVALID_VALUE};
    }
  });
}

SOFTCUDA_API cuStreamCopyAttributes(CUstream dst, CUstream src) {
  return locked_call([&] {
    const auto from = stream_at(src);
    const auto to = stream_at(dst);
    to->attributes = from->attributes;
    to->priority = from->priority;
  });
}

SOFTCUDA_API cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags) {
  return locked_call([&] {
    require(callback != nullptr && flags == 0);
    const auto stream = resolve_stream(hStream);
    refuse_capturing(*stream);
    const auto fault = stream->context.lock()->fault;
    enqueue(*stream, [=] { callback(hStream, fault->load(), userData); });
  });
}

SOFTCUDA_API cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus) {
  return locked_call([&] {
    require(captureStatus != nullptr);
    const auto stream = resolve_stream(hStream);
    *captureStatus = stream->capture == nullptr     ? CU_STREAM_CAPTURE_STATUS_NONE
                     : stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                                    : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  });
}
