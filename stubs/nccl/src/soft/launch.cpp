// SPDX-License-Identifier: Apache-2.0
//
// One kernel for each group and communicator, launched as NCCL launches its own: arguments in `extra`, one by-value
// struct, and under capture an external wait before and an external record behind it.
#include <algorithm>
#include <cstring>

#include "soft/soft_communicator.h"

namespace ncclstub::soft {
namespace {

// The kernel's image is part of the library.
extern "C" {
extern const char softnccl_image[] __attribute__((visibility("hidden")));
}
asm(".pushsection .rodata\n"
    ".balign 16\n"
    ".hidden softnccl_image\n"
    ".globl softnccl_image\n"
    "softnccl_image:\n"
    ".incbin \"" SOFTNCCL_IMAGE
    "\"\n"
    ".popsection\n");

ncclResult_t load_library(CUkernel *out) {
  CUlibrary library = nullptr;
  NCCL_TRY(CU(cuLibraryLoadData, &library, static_cast<const void *>(softnccl_image), nullptr, nullptr, 0u, nullptr,
              nullptr, 0u));
  return CU(cuLibraryGetKernel, out, library, kKernelName);
}

}  // namespace

ncclResult_t load_kernel(CUfunction *out) {
  static std::mutex mutex;
  static CUkernel kernel = nullptr;  // of the process, as long as it lives
  const std::lock_guard lock(mutex);
  if (kernel == nullptr) NCCL_TRY(load_library(&kernel));
  NCCL_TRY(CU(cuKernelGetFunction, out, kernel));
  // Loaded in full now: a lazy load at the first launch may wait for a kernel that waits for this one.
  return CU(cuFuncLoad, *out);
}

// Collectives first: they are in the same order on every rank, and everybody takes part.
std::vector<Op> SoftCommunicator::lower(const std::vector<Task> &tasks) {
  std::vector<Op> ops;
  for (const Task &task : tasks) {
    Op &op = ops.emplace_back();
    op = {reinterpret_cast<uint64_t>(task.send),
          reinterpret_cast<uint64_t>(task.recv),
          task.count,
          0,
          task.kind,
          task.type,
          static_cast<uint32_t>(task.op),
          static_cast<uint32_t>(task.peer)};
    if (!is_reduction(task.kind) || task.op < ncclNumOps) continue;
    const PreMul value = premul(task.op);
    op.reduction = value.scalar_on_device ? kPreMulSumOnDevice : kPreMulSum;
    op.scalar = value.scalar;
  }
  std::ranges::stable_partition(ops, [](const Op &op) { return !is_point_to_point(op.kind); });
  return ops;
}

ncclResult_t SoftCommunicator::launch(const std::vector<Task> &tasks, CUstream stream, const Capture &capture) {
  auto plan = std::make_unique<Plan>();
  plan->state = state_;
  plan->ops = lower(tasks);
  const auto is_collective = [](const Op &op) { return !is_point_to_point(op.kind); };
  KernelArgs args{};
  args.state = state_.get();
  args.op_count = static_cast<uint32_t>(plan->ops.size());
  args.collective_count = static_cast<uint32_t>(std::ranges::count_if(plan->ops, is_collective));
  if (plan->ops.size() <= kInlineOps) {
    std::ranges::copy(plan->ops, args.inlined);
  } else {
    args.ops = plan->ops.data();
  }
  const std::lock_guard lock(mutex_);
  return capture.id == 0 ? launch_eager(args, std::move(plan), stream)
                         : launch_captured(args, std::move(plan), stream, capture);
}

ncclResult_t SoftCommunicator::launch_kernel(const KernelArgs &args, CUstream stream) {
  CUlaunchAttribute attributes[2] = {};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attributes[0].value.clusterDim = {1, 1, 1};
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN;
  attributes[1].value.memSyncDomain = CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE;
  CUlaunchConfig how{};
  how.gridDimX = how.gridDimY = how.gridDimZ = 1;
  how.blockDimX = 512;
  how.blockDimY = how.blockDimZ = 1;
  how.hStream = stream;
  how.attrs = attributes;
  how.numAttrs = 2;
  KernelArgs copy = args;
  // As in NCCL the buffer ends with what is used of the struct.
  size_t bytes = offsetof(KernelArgs, inlined) + (args.ops == nullptr ? args.op_count * sizeof(Op) : 0);
  void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &copy, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  return CU(cuLaunchKernelEx, static_cast<const CUlaunchConfig *>(&how), function_, static_cast<void **>(nullptr),
            static_cast<void **>(extra));
}

ncclResult_t SoftCommunicator::launch_eager(KernelArgs args, std::unique_ptr<Plan> plan, CUstream stream) {
  while (!plans_.empty() && plans_.front()->finished.load(std::memory_order_acquire)) plans_.pop_front();
  args.finished = &plan->finished;
  NCCL_TRY(CU(cuStreamWaitEvent, stream, serial_, 0u));
  NCCL_TRY(launch_kernel(args, stream));
  plans_.push_back(std::move(plan));
  return CU(cuEventRecord, serial_, stream);
}

ncclResult_t SoftCommunicator::launch_captured(KernelArgs args, std::unique_ptr<Plan> plan, CUstream stream,
                                               const Capture &capture) {
  CUuserObject object = nullptr;
  const auto destroy = [](void *data) { const std::unique_ptr<Plan> owned(static_cast<Plan *>(data)); };
  NCCL_TRY(CU(cuUserObjectCreate, &object, static_cast<void *>(plan.get()), static_cast<CUhostFn>(destroy), 1u,
              static_cast<unsigned>(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)));
  static_cast<void>(plan.release());  // the object's now
  const ncclResult_t moved =
      CU(cuGraphRetainUserObject, capture.graph, object, 1u, static_cast<unsigned>(CU_GRAPH_USER_OBJECT_MOVE));
  if (moved != ncclSuccess) {
    CU(cuUserObjectRelease, object, 1u);
    return moved;
  }
  if (!config.graph_mixing) return launch_kernel(args, stream);

  std::vector<CUgraphNode> frontier = capture.frontier;
  const auto record = std::ranges::find(records_, capture.id, &std::pair<cuuint64_t, CUgraphNode>::first);
  if (record != records_.end()) {
    frontier.push_back(record->second);
    records_.erase(record);
  } else {
    CUgraphNode wait = nullptr;
    NCCL_TRY(CU(cuGraphAddEventWaitNode, &wait, capture.graph, static_cast<const CUgraphNode *>(nullptr), size_t{0},
                serial_));
    frontier.push_back(wait);
  }
  NCCL_TRY(set_frontier(stream, std::move(frontier)));
  NCCL_TRY(launch_kernel(args, stream));
  Capture after;
  NCCL_TRY(read_capture(stream, &after));
  CUgraphNode recorded = nullptr;
  NCCL_TRY(CU(cuGraphAddEventRecordNode, &recorded, capture.graph,
              static_cast<const CUgraphNode *>(after.frontier.data()), after.frontier.size(), serial_));
  constexpr size_t kCapturesAtOnce = 16;
  if (records_.size() == kCapturesAtOnce) records_.erase(records_.begin());
  records_.emplace_back(capture.id, recorded);
  return ncclSuccess;
}

}  // namespace ncclstub::soft
