// SPDX-License-Identifier: Apache-2.0
//
// Values written and awaited in stream order.  Under capture they become batch memory-operation nodes.
#include <atomic>
#include <ctime>

#include "capture.h"
#include "context.h"
#include "memory.h"

namespace softcuda {

namespace {

constexpr unsigned kMostOps = 256;
constexpr long kPollNanoseconds = 50'000;

template <class T>
bool reached(T now, T wanted, unsigned flags) {
  using Signed = std::make_signed_t<T>;
  switch (flags & ~unsigned{CU_STREAM_WAIT_VALUE_FLUSH}) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return static_cast<Signed>(now - wanted) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return now == wanted;
    case CU_STREAM_WAIT_VALUE_AND:
      return (now & wanted) != 0;
    default:
      return static_cast<T>(~(now | wanted)) != 0;
  }
}

// The memory is anybody's to write, so there is nothing to be woken by: looks, sleeps, looks again.
template <class T>
void await(CUdeviceptr address, T wanted, unsigned flags) {
  const std::atomic_ref<T> value(*reinterpret_cast<T *>(address));
  while (!reached(value.load(std::memory_order_acquire), wanted, flags)) {
    const timespec pause{0, kPollNanoseconds};
    nanosleep(&pause, nullptr);
  }
}

template <class T>
void store(CUdeviceptr address, T value) {
  std::atomic_ref<T>(*reinterpret_cast<T *>(address)).store(value, std::memory_order_release);
}

void check(const CUstreamBatchMemOpParams &op) {
  switch (op.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
    case CU_STREAM_MEM_OP_WAIT_VALUE_64: {
      const unsigned bytes = op.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 ? 4 : 8;
      require((op.waitValue.flags & ~unsigned{CU_STREAM_WAIT_VALUE_FLUSH}) <= CU_STREAM_WAIT_VALUE_NOR);
      require(op.waitValue.address % bytes == 0 && ranges().covers(op.waitValue.address, bytes, false));
      return;
    }
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
    case CU_STREAM_MEM_OP_WRITE_VALUE_64: {
      const unsigned bytes = op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 ? 4 : 8;
      require(op.writeValue.flags <= CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER);
      require(op.writeValue.address % bytes == 0 && ranges().covers(op.writeValue.address, bytes, true));
      return;
    }
    case CU_STREAM_MEM_OP_BARRIER:
    case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
      return;
    default:
      throw Failure{CUDA_ERROR_INVALID_VALUE};
  }
}

void run(const CUstreamBatchMemOpParams &op) {
  switch (op.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32:
      return await<uint32_t>(op.waitValue.address, op.waitValue.value, op.waitValue.flags);
    case CU_STREAM_MEM_OP_WAIT_VALUE_64:
      return await<uint64_t>(op.waitValue.address, op.waitValue.value64, op.waitValue.flags);
    case CU_STREAM_MEM_OP_WRITE_VALUE_32:
      return store<uint32_t>(op.writeValue.address, op.writeValue.value);
    case CU_STREAM_MEM_OP_WRITE_VALUE_64:
      return store<uint64_t>(op.writeValue.address, op.writeValue.value64);
    default:
      return;
  }
}

void submit(CUstream handle, std::vector<CUstreamBatchMemOpParams> ops) {
  const auto stream = resolve_stream(handle);
  for (const auto &op : ops) check(op);
  auto held = std::make_shared<std::vector<CUstreamBatchMemOpParams>>(std::move(ops));
  if (capturing(*stream)) {
    BatchWork work;
    work.context = Handles<Context, CUcontext>::handle(stream->context.lock());
    work.ops = std::move(held);
    capture_work(*stream, std::move(work));
    return;
  }
  enqueue(*stream, [held] {
    for (const auto &op : *held) run(op);
  });
}

CUresult submit_one(CUstream stream, CUstreamBatchMemOpType operation, CUdeviceptr address, uint64_t value, bool wide,
                    bool wait, unsigned flags) {
  return locked_call([&] {
    CUstreamBatchMemOpParams op{};
    if (wait) {
      op.waitValue.operation = operation;
      op.waitValue.address = address;
      op.waitValue.flags = flags;
      if (wide) {
        op.waitValue.value64 = value;
      } else {
        op.waitValue.value = static_cast<uint32_t>(value);
      }
    } else {
      op.writeValue.operation = operation;
      op.writeValue.address = address;
      op.writeValue.flags = flags;
      if (wide) {
        op.writeValue.value64 = value;
      } else {
        op.writeValue.value = static_cast<uint32_t>(value);
      }
    }
    submit(stream, {op});
  });
}

}  // namespace

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags) {
  return submit_one(stream, CU_STREAM_MEM_OP_WAIT_VALUE_32, addr, value, false, true, flags);
}

SOFTCUDA_API cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags) {
  return submit_one(stream, CU_STREAM_MEM_OP_WAIT_VALUE_64, addr, value, true, true, flags);
}

SOFTCUDA_API cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags) {
  return submit_one(stream, CU_STREAM_MEM_OP_WRITE_VALUE_32, addr, value, false, false, flags);
}

SOFTCUDA_API cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags) {
  return submit_one(stream, CU_STREAM_MEM_OP_WRITE_VALUE_64, addr, value, true, false, flags);
}

SOFTCUDA_API cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray,
                                   unsigned int flags) {
  return locked_call([&] {
    require(count <= kMostOps && flags == 0 && (count == 0 || paramArray != nullptr));
    if (count > 0) submit(stream, {paramArray, paramArray + count});
  });
}
