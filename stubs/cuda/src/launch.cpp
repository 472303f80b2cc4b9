// SPDX-License-Identifier: Apache-2.0
#include "launch.h"

#include <algorithm>
#include <cstring>

#include "capture.h"
#include "context.h"
#include "device.h"
#include "event.h"
#include "random.h"

#undef blockIdx
#undef gridDim
#undef threadIdx
#undef blockDim

namespace softcuda {

namespace {

// The program's argument buffer, from `extra`.
struct Buffer {
  const void *data = nullptr;
  size_t bytes = 0;
};

Buffer read_extra(void **extra) {
  Buffer buffer;
  for (size_t i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      buffer.data = extra[i + 1];
    } else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      require(extra[i + 1] != nullptr);
      buffer.bytes = *static_cast<const size_t *>(extra[i + 1]);
    } else {
      throw Failure{CUDA_ERROR_INVALID_VALUE};
    }
  }
  require(buffer.data != nullptr || buffer.bytes == 0);
  return buffer;
}

std::shared_ptr<Arguments> pack_arguments(const KernelEntry &entry, const LaunchRequest &request) {
  require(request.params == nullptr || request.extra == nullptr);
  require(entry.param_count == 0 || request.params != nullptr || request.extra != nullptr);
  auto arguments = std::make_shared<Arguments>();
  arguments->lines.resize((entry.param_bytes + sizeof(Arguments::Line) - 1) / sizeof(Arguments::Line));
  // Padding, and what a short buffer does not reach, is whatever was there.
  scramble(arguments->data(), arguments->lines.size() * sizeof(Arguments::Line));
  for (uint32_t i = 0; i < entry.param_count; ++i) {
    arguments->pointers.push_back(arguments->data() + entry.param_offsets[i]);
  }
  if (request.extra != nullptr) {
    const Buffer buffer = read_extra(request.extra);
    require(buffer.bytes <= entry.param_bytes, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    if (buffer.bytes > 0) std::memcpy(arguments->data(), buffer.data, buffer.bytes);
    arguments->from_extra = true;
    arguments->extra_bytes = buffer.bytes;
    // The driver gives the size first, whatever the program did.
    arguments->extra = {CU_LAUNCH_PARAM_BUFFER_SIZE, &arguments->extra_bytes, CU_LAUNCH_PARAM_BUFFER_POINTER,
                        arguments->data(), CU_LAUNCH_PARAM_END};
    return arguments;
  }
  for (uint32_t i = 0; i < entry.param_count; ++i) {
    require(request.params[i] != nullptr);
    std::memcpy(arguments->pointers[i], request.params[i], entry.param_sizes[i]);
  }
  return arguments;
}

uint64_t product(const std::array<unsigned, 3> &shape) {
  return uint64_t{shape[0]} * shape[1] * shape[2];
}

void record_in_capture(const CUevent handle, const std::shared_ptr<Stream> &stream, const std::shared_ptr<Node> &node,
                       const CUgraphEdgeData &data) {
  const auto event = process().events.get(handle);
  event->captured = true;
  event->capture = stream->capture;
  event->dependencies = {{node, data}};
}

// Attributes that say how a launch is ordered.  In a graph they become edge data.
struct Ordering {
  bool programmatic = false;
  CUevent trigger = nullptr;  // programmatic event
  CUevent begun = nullptr;    // launch-completion event
};

void submit(CUfunction function, const LaunchRequest &request, std::span<const CUlaunchAttribute> given,
            CUstream handle) {
  Lock lock = lock_process();
  std::shared_ptr<Function> callee;
  for (;;) {
    callee = callee_at(function);
    if (callee->loaded) break;
    ensure_loaded(lock, callee);  // may let go of the lock
  }
  wait_for_loading(lock, current_context());
  const auto stream = resolve_stream(handle);
  const auto module = callee->module.lock();
  require(module != nullptr && module->context.lock() == stream->context.lock(), CUDA_ERROR_INVALID_HANDLE);
  KernelWork work = kernel_work(callee, request);
  Attributes attributes;
  Ordering ordering;
  if (stream->priority != 0) attributes[CU_LAUNCH_ATTRIBUTE_PRIORITY].priority = stream->priority;
  for (const CUlaunchAttribute &attribute : given) {
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
        break;
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
        throw Failure{CUDA_ERROR_INVALID_VALUE};
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        ordering.programmatic = attribute.value.programmaticStreamSerializationAllowed != 0;
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
        ordering.trigger = attribute.value.programmaticEvent.event;
        break;
      case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
        ordering.begun = attribute.value.launchCompletionEvent.event;
        break;
      default:
        check_node_attribute(attribute.id, attribute.value);
        attributes[attribute.id] = clean_attribute(attribute.id, attribute.value);
    }
  }
  check_attributes(work, attributes);
  work.cluster = cluster_shape(attributes);
  ++counters().launches;
  if (capturing(*stream)) {
    if (ordering.programmatic) {
      for (Dependency &dependency : stream->frontier) {
        if (node_type(*dependency.node->work) != CU_GRAPH_NODE_TYPE_KERNEL || !plain(dependency.data)) continue;
        dependency.data.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
        dependency.data.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
      }
    }
    const auto node = capture_work(*stream, std::move(work), std::move(attributes));
    CUgraphEdgeData data{};
    data.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    data.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
    if (ordering.trigger != nullptr) record_in_capture(ordering.trigger, stream, node, data);
    // Whoever waits for the launch to begin depends on a port, by an edge of the plain type.
    data = {};
    data.from_port = CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER;
    if (ordering.begun != nullptr) record_in_capture(ordering.begun, stream, node, data);
    return;
  }
  enqueue(*stream, [work = std::make_shared<const KernelWork>(std::move(work))] { run_kernel(*work); });
  // An event may be late, never early: here a kernel's end stands for its beginning.
  for (const CUevent event : {ordering.trigger, ordering.begun}) {
    if (event != nullptr) record_event(process().events.get(event), *stream);
  }
}

}  // namespace

KernelWork kernel_work(const std::shared_ptr<Function> &callee, const LaunchRequest &request) {
  const Function &function = *callee;
  require(product(request.grid) > 0 && product(request.block) > 0);
  require(request.grid[0] <= 0x7fffffffu && request.grid[1] <= 65535 && request.grid[2] <= 65535);
  require(request.block[0] <= 1024 && request.block[1] <= 1024 && request.block[2] <= 64);
  require(product(request.block) <= kMaxThreadsPerBlock);
  const int most =
      function_attribute(*function.entry, function.settings, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
  require(request.shared_bytes <= static_cast<unsigned>(most));
  const auto module = function.module.lock();
  require(module != nullptr, CUDA_ERROR_INVALID_HANDLE);
  KernelWork work;
  work.function = callee;
  work.context = Handles<Context, CUcontext>::handle(module->context.lock());
  work.grid = request.grid;
  work.block = request.block;
  work.shared_bytes = request.shared_bytes;
  work.arguments = pack_arguments(*function.entry, request);
  return work;
}

void check_attributes(const KernelWork &work, const Attributes &attributes) {
  if (const auto it = attributes.find(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION); it != attributes.end()) {
    const auto &dim = it->second.clusterDim;
    const std::array<unsigned, 3> cluster{dim.x, dim.y, dim.z};
    for (size_t i = 0; i < 3; ++i) {
      require(cluster[i] == 0 || work.grid[i] % cluster[i] == 0, CUDA_ERROR_INVALID_CLUSTER_SIZE);
    }
    const FunctionSettings &settings = work.function->settings;
    const auto large = settings.find(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
    const uint64_t most = large != settings.end() && large->second != 0 ? 16 : 8;
    require(product(cluster) <= most, CUDA_ERROR_INVALID_CLUSTER_SIZE);
  }
  if (const auto it = attributes.find(CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
      it != attributes.end() && it->second.cooperative != 0) {
    const uint64_t resident =
        uint64_t{kMultiprocessors} * (kThreadsPerMultiprocessor / static_cast<uint64_t>(product(work.block)));
    require(product(work.grid) <= resident, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  }
}

std::array<unsigned, 3> cluster_shape(const Attributes &attributes) {
  const auto it = attributes.find(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  if (it == attributes.end()) return {1, 1, 1};
  const auto &dim = it->second.clusterDim;
  return {std::max(dim.x, 1u), std::max(dim.y, 1u), std::max(dim.z, 1u)};
}

void run_kernel(const KernelWork &work) {
  thread_local std::vector<Arguments::Line> shared;
  shared.resize((work.shared_bytes + sizeof(Arguments::Line) - 1) / sizeof(Arguments::Line));
  Launch launch{};
  launch.grid = {work.grid[0], work.grid[1], work.grid[2]};
  launch.block = {work.block[0], work.block[1], work.block[2]};
  launch.shared_bytes = work.shared_bytes;
  launch.shared = shared.empty() ? nullptr : shared.data();
  launch.cluster = {work.cluster[0], work.cluster[1], work.cluster[2]};
  const Invoke invoke = work.function->entry->invoke;
  for (unsigned z = 0; z < work.grid[2]; ++z) {
    for (unsigned y = 0; y < work.grid[1]; ++y) {
      for (unsigned x = 0; x < work.grid[0]; ++x) {
        launch.index = {x, y, z};
        if (!shared.empty()) std::memset(shared.data(), 0xcb, work.shared_bytes);
        require(invoke(launch, work.arguments->pointers.data()), CUDA_ERROR_LAUNCH_FAILED);
      }
    }
  }
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                            unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                            unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra) {
  return call([&] {
    submit(f, {{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes, kernelParams, extra},
           {}, hStream);
  });
}

SOFTCUDA_API cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) {
  return call([&] {
    require(config != nullptr && (config->numAttrs == 0 || config->attrs != nullptr));
    submit(f,
           {{config->gridDimX, config->gridDimY, config->gridDimZ},
            {config->blockDimX, config->blockDimY, config->blockDimZ},
            config->sharedMemBytes,
            kernelParams,
            extra},
           {config->attrs, config->numAttrs}, config->hStream);
  });
}

SOFTCUDA_API cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                       unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
                                       unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                       void **kernelParams) {
  return call([&] {
    CUlaunchAttribute cooperative{};
    cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    cooperative.value.cooperative = 1;
    submit(f,
           {{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes, kernelParams, nullptr},
           {&cooperative, 1}, hStream);
  });
}

SOFTCUDA_API cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData) {
  return locked_call([&] {
    require(fn != nullptr);
    const auto stream = resolve_stream(hStream);
    if (capturing(*stream)) {
      capture_work(*stream, HostWork{{fn, userData}});
      return;
    }
    enqueue(*stream, [=] { fn(userData); });
  });
}
