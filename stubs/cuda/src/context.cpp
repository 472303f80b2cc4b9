// SPDX-License-Identifier: Apache-2.0
#include "context.h"

#include <algorithm>

#include "capture.h"
#include "memory.h"
#include "module.h"
#include "stream.h"

namespace softcuda {

namespace {

constexpr unsigned kScheduleFlags = CU_CTX_SCHED_MASK;

// The depth of device-side synchronisation went with that synchronisation, in compute capability 9.0.
bool has_limit(CUlimit limit) {
  return limit < CU_LIMIT_MAX && limit != CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH;
}

std::shared_ptr<Context> new_context(CUdevice device, unsigned flags) {
  auto context = process().contexts.make();
  context->device = device;
  context->id = process().next_id++;
  context->flags = flags;
  open_context(context);
  return context;
}

// Takes everything that belongs to the context out of the tables.  Its work must have ended.
void close_context(const std::shared_ptr<Context> &context) {
  Process &all = process();
  const auto captures = all.captures;
  for (const auto &capture : captures) {
    if (capture->context.lock() == context) end_capture(capture);
  }
  for (const auto &stream : context->streams) {
    stream->queue->close();
    all.streams.remove(stream.get());
  }
  if (context->legacy != nullptr) context->legacy->queue->close();
  for (const auto &lane : context->lanes) lane->close();
  release_memory(*context);
  for (const auto &module : context->modules) forget_module(module);
  context->streams.clear();
  context->modules.clear();
  context->lanes.clear();
  context->legacy.reset();
  context->peers.clear();
  context->active = false;
}

std::shared_ptr<Context> context_at(CUcontext handle) {
  auto context = process().contexts.get(handle, CUDA_ERROR_INVALID_CONTEXT);
  require(context->active, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  return context;
}

void create_context(CUcontext *out, unsigned flags, CUdevice device, unsigned version) {
  require(out != nullptr && (flags & ~unsigned{CU_CTX_FLAGS_MASK}) == 0);
  const Lock lock = lock_process();
  refuse_under_capture();
  device_at(device);
  auto context = new_context(device, flags);
  context->api_version = version;
  this_thread().contexts.push_back(context);
  *out = Handles<Context, CUcontext>::handle(context);
}

void synchronize(const std::shared_ptr<Context> &given) {
  std::vector<Mark> marks;
  std::shared_ptr<Context> context = given;
  {
    const Lock lock = lock_process();
    if (context == nullptr) context = current_context();
    refuse_under_capture();
    for (const auto &capture : process().captures) {
      // Waiting for a context would wait for the streams that are being captured.
      if (capture->context.lock() == context) {
        invalidate(*capture);
        throw Failure{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
      }
    }
    marks = pending_work(*context);
  }
  wait_all(marks);
  require(context->fault->load() == CUDA_SUCCESS, context->fault->load());
}

}  // namespace

std::shared_ptr<Context> current_context_or_null() {
  auto &stack = this_thread().contexts;
  return stack.empty() ? nullptr : stack.back().lock();
}

std::shared_ptr<Context> current_context() {
  auto &stack = this_thread().contexts;
  require(!stack.empty(), CUDA_ERROR_INVALID_CONTEXT);
  auto context = stack.back().lock();
  require(context != nullptr && context->active, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  const CUresult fault = context->fault->load();
  require(fault == CUDA_SUCCESS, fault);
  return context;
}

void open_context(const std::shared_ptr<Context> &context) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->queue = std::make_shared<Queue>(context->fault);
  stream->id = process().next_id++;
  stream->legacy = true;
  context->legacy = stream;
  context->active = true;
}

std::vector<Mark> pending_work(const Context &context) {
  std::vector<Mark> marks;
  const auto add = [&](const std::shared_ptr<Stream> &stream) {
    if (Mark mark = stream->queue->tail(); mark.queue != nullptr) marks.push_back(std::move(mark));
  };
  if (context.legacy != nullptr) add(context.legacy);
  for (const auto &stream : context.streams) add(stream);
  return marks;
}

}  // namespace softcuda

using namespace softcuda;
using ContextHandles = Handles<Context, CUcontext>;

SOFTCUDA_API cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
  return locked_call([&] {
    require(pctx != nullptr);
    Device &device = device_at(dev);
    if (device.primary == nullptr) {
      device.primary = new_context(dev, device.primary_flags);
      device.primary->primary = true;
    } else if (!device.primary->active) {
      device.primary->fault = std::make_shared<Fault>(CUDA_SUCCESS);
      device.primary->flags = device.primary_flags;
      open_context(device.primary);
    }
    ++device.primary_references;
    *pctx = ContextHandles::handle(device.primary);
  });
}

namespace {

void end_primary(CUdevice dev, bool reset) {
  std::vector<Mark> marks;
  std::shared_ptr<Context> context;
  {
    const Lock lock = lock_process();
    Device &device = device_at(dev);
    if (!reset) {
      require(device.primary_references > 0, CUDA_ERROR_INVALID_CONTEXT);
      if (--device.primary_references > 0) return;
    }
    if (device.primary == nullptr || !device.primary->active) return;
    context = device.primary;
    marks = pending_work(*context);
  }
  wait_all(marks);
  const Lock lock = lock_process();
  Device &device = device_at(dev);
  if (!reset && device.primary_references > 0) return;
  if (context->active) close_context(context);
}

}  // namespace

SOFTCUDA_API cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
  return call([&] { end_primary(dev, false); });
}

SOFTCUDA_API cuDevicePrimaryCtxReset_v2(CUdevice dev) {
  return call([&] { end_primary(dev, true); });
}

SOFTCUDA_API cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
  return locked_call([&] {
    Device &device = device_at(dev);
    require((flags & ~unsigned{CU_CTX_FLAGS_MASK}) == 0);
    device.primary_flags = flags;
    if (device.primary != nullptr && device.primary->active) device.primary->flags = flags;
  });
}

SOFTCUDA_API cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
  return locked_call([&] {
    const Device &device = device_at(dev);
    require(flags != nullptr && active != nullptr);
    *flags = device.primary_flags;
    *active = device.primary != nullptr && device.primary->active ? 1 : 0;
  });
}

SOFTCUDA_API cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) {
  return call([&] { create_context(pctx, flags, dev, 3020); });
}

SOFTCUDA_API cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *, int numParams, unsigned int flags, CUdevice dev) {
  return call([&] {
    require(numParams == 0, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    create_context(pctx, flags, dev, 3020);
  });
}

SOFTCUDA_API cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *params, unsigned int flags, CUdevice dev) {
  return call([&] {
    require(params == nullptr || params->numExecAffinityParams == 0, CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY);
    require(params == nullptr || params->cigParams == nullptr, CUDA_ERROR_NOT_SUPPORTED);
    create_context(pctx, flags, dev, 3020);
  });
}

SOFTCUDA_API cuCtxDestroy_v2(CUcontext ctx) {
  return call([&] {
    std::vector<Mark> marks;
    std::shared_ptr<Context> context;
    {
      const Lock lock = lock_process();
      context = context_at(ctx);
      require(!context->primary, CUDA_ERROR_INVALID_CONTEXT);
      marks = pending_work(*context);
    }
    wait_all(marks);
    const Lock lock = lock_process();
    if (!context->active) return;
    close_context(context);
    process().contexts.remove(context.get());
    auto &stack = this_thread().contexts;
    if (!stack.empty() && stack.back().lock() == context) stack.pop_back();
  });
}

SOFTCUDA_API cuCtxPushCurrent_v2(CUcontext ctx) {
  return locked_call([&] { this_thread().contexts.push_back(context_at(ctx)); });
}

SOFTCUDA_API cuCtxPopCurrent_v2(CUcontext *pctx) {
  return locked_call([&] {
    auto &stack = this_thread().contexts;
    require(!stack.empty(), CUDA_ERROR_INVALID_CONTEXT);
    const auto context = stack.back().lock();
    stack.pop_back();
    if (pctx != nullptr) *pctx = ContextHandles::handle(context);
  });
}

SOFTCUDA_API cuCtxSetCurrent(CUcontext ctx) {
  return locked_call([&] {
    auto &stack = this_thread().contexts;
    if (ctx == nullptr) {
      if (!stack.empty()) stack.pop_back();
      return;
    }
    auto context = context_at(ctx);
    if (stack.empty()) {
      stack.push_back(context);
    } else {
      stack.back() = context;
    }
  });
}

SOFTCUDA_API cuCtxGetCurrent(CUcontext *pctx) {
  return locked_call([&] {
    require(pctx != nullptr);
    *pctx = ContextHandles::handle(current_context_or_null());
  });
}

SOFTCUDA_API cuCtxGetDevice(CUdevice *device) {
  return locked_call([&] {
    require(device != nullptr);
    *device = current_context()->device;
  });
}

SOFTCUDA_API cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx) {
  return locked_call([&] {
    require(device != nullptr);
    *device = ctx == nullptr ? current_context()->device : context_at(ctx)->device;
  });
}

SOFTCUDA_API cuCtxGetFlags(unsigned int *flags) {
  return locked_call([&] {
    require(flags != nullptr);
    *flags = current_context()->flags | CU_CTX_MAP_HOST;  // every context can, and says so
  });
}

SOFTCUDA_API cuCtxSetFlags(unsigned int flags) {
  return locked_call([&] {
    require((flags & ~unsigned{CU_CTX_FLAGS_MASK}) == 0);
    auto context = current_context();
    context->flags = (context->flags & kScheduleFlags) | (flags & ~kScheduleFlags);
  });
}

SOFTCUDA_API cuCtxGetId(CUcontext ctx, unsigned long long *ctxId) {
  return locked_call([&] {
    require(ctxId != nullptr);
    *ctxId = (ctx == nullptr ? current_context() : context_at(ctx))->id;
  });
}

SOFTCUDA_API cuCtxSynchronize() {
  return call([&] { synchronize(nullptr); });
}

SOFTCUDA_API cuCtxSynchronize_v2(CUcontext ctx) {
  return call([&] {
    std::shared_ptr<Context> context;
    if (ctx != nullptr) {
      const Lock lock = lock_process();
      context = context_at(ctx);
    }
    synchronize(context);
  });
}

SOFTCUDA_API cuCtxSetLimit(CUlimit limit, size_t value) {
  return locked_call([&] {
    auto context = current_context();
    require(has_limit(limit), CUDA_ERROR_UNSUPPORTED_LIMIT);
    context->limits[limit] = value;
  });
}

SOFTCUDA_API cuCtxGetLimit(size_t *pvalue, CUlimit limit) {
  return locked_call([&] {
    auto context = current_context();
    require(pvalue != nullptr);
    require(has_limit(limit), CUDA_ERROR_UNSUPPORTED_LIMIT);
    *pvalue = context->limits[limit];
  });
}

SOFTCUDA_API cuCtxGetCacheConfig(CUfunc_cache *pconfig) {
  return locked_call([&] {
    require(pconfig != nullptr);
    *pconfig = current_context()->cache;
  });
}

SOFTCUDA_API cuCtxSetCacheConfig(CUfunc_cache config) {
  return locked_call([&] { current_context()->cache = config; });
}

SOFTCUDA_API cuCtxGetApiVersion(CUcontext ctx, unsigned int *version) {
  return locked_call([&] {
    require(version != nullptr);
    *version = (ctx == nullptr ? current_context() : context_at(ctx))->api_version;
  });
}

SOFTCUDA_API cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority) {
  return locked_call([&] {
    current_context();
    if (leastPriority != nullptr) *leastPriority = kLeastPriority;
    if (greatestPriority != nullptr) *greatestPriority = kGreatestPriority;
  });
}

SOFTCUDA_API cuCtxResetPersistingL2Cache() {
  return locked_call([] { current_context(); });
}

SOFTCUDA_API cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags) {
  return locked_call([&] {
    require(Flags == 0);
    auto context = current_context();
    const auto peer = context_at(peerContext);
    require(peer->device != context->device, CUDA_ERROR_INVALID_DEVICE);
    require(context->peers.insert(peer.get()).second, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  });
}

SOFTCUDA_API cuCtxDisablePeerAccess(CUcontext peerContext) {
  return locked_call([&] {
    auto context = current_context();
    require(context->peers.erase(context_at(peerContext).get()) == 1, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
  });
}
