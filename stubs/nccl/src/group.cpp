// SPDX-License-Identifier: Apache-2.0
#include "group.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

namespace ncclstub {
namespace {

// The tasks of one communicator in a group.
struct Batch {
  ncclComm_t comm;
  cuuint64_t capture_id;
  std::vector<CUstream> streams;  // in the order of first use
  std::vector<Task> tasks;
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;  // the first of the group
  std::vector<Batch> batches;
  std::vector<std::function<ncclResult_t()>> jobs;
};

thread_local Group group;

ncclResult_t guarded(const std::function<ncclResult_t()> &job) noexcept {
  try {
    return job();
  } catch (const std::exception &error) {
    return fail(ncclSystemError, "an initialisation failed: %s", error.what());
  }
}

ncclResult_t run_jobs(const std::vector<std::function<ncclResult_t()>> &jobs) {
  if (jobs.size() == 1 || !kInitBlocks) {
    for (const auto &job : jobs) NCCL_TRY(guarded(job));
    return ncclSuccess;
  }
  std::vector<ncclResult_t> results(jobs.size(), ncclSuccess);
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < jobs.size(); ++i) {
      try {
        threads.emplace_back([&, i] { results[i] = guarded(jobs[i]); });
      } catch (const std::system_error &error) {
        results[i] = fail(ncclSystemError, "no thread for an initialisation: %s", error.what());
      }
    }
  }
  const auto bad = std::ranges::find_if(results, [](ncclResult_t result) { return result != ncclSuccess; });
  return bad == results.end() ? ncclSuccess : *bad;
}

// Makes `later` wait for what is in `earlier` now.  Under capture the event becomes edges.
ncclResult_t order_streams(CUstream earlier, CUstream later) {
  CUevent event = nullptr;
  NCCL_TRY(CU(cuEventCreate, &event, static_cast<unsigned>(CU_EVENT_DISABLE_TIMING)));
  ncclResult_t result = CU(cuEventRecord, event, earlier);
  if (result == ncclSuccess) result = CU(cuStreamWaitEvent, later, event, 0u);
  const ncclResult_t destroyed = CU(cuEventDestroy, event);
  return result != ncclSuccess ? result : destroyed;
}

ncclResult_t launch_batch(const Batch &batch) {
  NCCL_TRY(check_handle(batch.comm));
  const ContextScope context(batch.comm->context);
  NCCL_TRY(context.result());
  // As in NCCL the launch goes on the stream that joined last; the others wait before and after.
  const CUstream stream = batch.streams.back();
  const std::vector<CUstream> others(batch.streams.begin(), batch.streams.end() - 1);
  for (CUstream other : others) NCCL_TRY(order_streams(other, stream));
  Capture capture;
  NCCL_TRY(read_capture(stream, &capture));
  if (capture.id != batch.capture_id) {
    return fail(
        ncclInvalidUsage,
        "stream %p was in capture %llu when its call was grouped and is in %llu now: end a group in the capture "
        "that it began in",
        static_cast<void *>(stream), static_cast<unsigned long long>(batch.capture_id),
        static_cast<unsigned long long>(capture.id));
  }
  NCCL_TRY(batch.comm->launch(batch.tasks, stream, capture));
  for (CUstream other : others) NCCL_TRY(order_streams(stream, other));
  return ncclSuccess;
}

ncclResult_t launch_batches(const std::vector<Batch> &batches) {
  const auto captured = [](const Batch &batch) { return batch.capture_id != 0; };
  if (std::ranges::any_of(batches, captured) && !std::ranges::all_of(batches, captured)) {
    return fail(ncclInvalidUsage,
                "some communicators of a group are captured and some are not: put them in groups of their own");
  }
  for (const Batch &batch : batches) NCCL_TRY(launch_batch(batch));
  return ncclSuccess;
}

ncclResult_t append(ncclComm_t comm, const Task &task, CUstream stream) {
  Capture capture;
  {
    const ContextScope context(comm->context);
    NCCL_TRY(context.result());
    NCCL_TRY(read_capture(stream, &capture));
  }
  auto batch = std::ranges::find(group.batches, comm, &Batch::comm);
  if (batch == group.batches.end()) {
    batch = group.batches.insert(group.batches.end(), Batch{comm, capture.id, {}, {}});
  }
  if (batch->capture_id != capture.id) {
    return fail(
        ncclInvalidUsage,
        "the streams of a communicator in one group are in captures %llu and %llu: they must all be in the same "
        "capture, or none",
        static_cast<unsigned long long>(batch->capture_id), static_cast<unsigned long long>(capture.id));
  }
  if (std::ranges::find(batch->streams, stream) == batch->streams.end()) batch->streams.push_back(stream);
  batch->tasks.push_back(task);
  return ncclSuccess;
}

// A communicator of one rank has nobody to talk to: a copy, or nothing in place, at once even in a group.
ncclResult_t copy_alone(ncclComm_t comm, const Task &task, CUstream stream) {
  if (task.send == task.recv) return ncclSuccess;
  const ContextScope context(comm->context);
  NCCL_TRY(context.result());
  return CU(cuMemcpyDtoDAsync, reinterpret_cast<CUdeviceptr>(task.recv), reinterpret_cast<CUdeviceptr>(task.send),
            task.count * type_bytes(task.type), stream);
}

ncclResult_t leave(bool launch) {
  if (group.depth == 0)
    return fail(ncclInvalidUsage, "a group is ended that was not started: call ncclGroupStart first");
  if (--group.depth > 0) return ncclSuccess;
  // The group is over whatever comes out of it; jobs may start groups of their own.
  const Group ended = std::exchange(group, Group{});
  NCCL_TRY(ended.error);
  NCCL_TRY(run_jobs(ended.jobs));
  return launch ? launch_batches(ended.batches) : ncclSuccess;
}

}  // namespace

ncclResult_t group_start() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t group_end() {
  return leave(true);
}

ncclResult_t group_drop() {
  return leave(false);
}

ncclResult_t group_failed(ncclResult_t result) {
  if (group.depth > 0 && group.error == ncclSuccess) group.error = result;
  return result;
}

ncclResult_t enqueue(ncclComm_t comm, const Task &task, CUstream stream) {
  if (task.count == 0) return ncclSuccess;
  const bool scaled = is_reduction(task.kind) && task.op >= ncclNumOps;
  if (comm->size == 1 && !is_point_to_point(task.kind) && !scaled) return group_failed(copy_alone(comm, task, stream));
  group_start();
  const ncclResult_t appended = group_failed(append(comm, task, stream));
  const ncclResult_t ended = group_end();
  return appended != ncclSuccess ? appended : ended;
}

ncclResult_t enqueue_job(std::function<ncclResult_t()> job) {
  group_start();
  group.jobs.push_back(std::move(job));
  return group_end();
}

}  // namespace ncclstub
