// SPDX-License-Identifier: Apache-2.0
//
// Communicators of any size with nobody behind them.
#include <algorithm>

#include "communicator.h"
#include "fake/plan.h"

namespace ncclstub {

const bool kInitBlocks = false;

bool can_reduce(ncclDataType_t) {
  return true;
}

namespace fake {
namespace {

ncclResult_t add_step(const Step &step, CUgraph graph, CUcontext context, CUgraphNode *last) {
  const std::vector<CUgraphNode> before(*last == nullptr ? 0 : 1, *last);
  if (step.from == 0) {
    CUDA_MEMSET_NODE_PARAMS params{};
    params.dst = step.to;
    params.elementSize = 1;
    params.width = step.bytes;
    params.height = 1;
    return CU(cuGraphAddMemsetNode, last, graph, before.data(), before.size(),
              static_cast<const CUDA_MEMSET_NODE_PARAMS *>(&params), context);
  }
  CUDA_MEMCPY3D params{};
  params.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  params.srcDevice = step.from;
  params.srcPitch = step.bytes;
  params.srcHeight = 1;
  params.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  params.dstDevice = step.to;
  params.dstPitch = step.bytes;
  params.dstHeight = 1;
  params.WidthInBytes = step.bytes;
  params.Height = 1;
  params.Depth = 1;
  return CU(cuGraphAddMemcpyNode, last, graph, before.data(), before.size(),
            static_cast<const CUDA_MEMCPY3D *>(&params), context);
}

ncclResult_t fill_graph(const std::vector<Step> &steps, CUgraph graph, CUcontext context) {
  CUgraphNode last = nullptr;
  for (const Step &step : steps) NCCL_TRY(add_step(step, graph, context, &last));
  if (!steps.empty()) return ncclSuccess;
  return CU(cuGraphAddEmptyNode, &last, graph, static_cast<const CUgraphNode *>(nullptr), size_t{0});
}

class FakeCommunicator final : public ncclComm {
 public:
  FakeCommunicator(const Shape &shape, bool known) : known_(known) {
    size = shape.size;
    rank = shape.rank;
    device = shape.device;
    context = shape.context;
    config = shape.config;
  }

  ncclResult_t launch(const std::vector<Task> &tasks, CUstream stream, const Capture &capture) override {
    const std::vector<Step> steps = make_plan(tasks, known_ ? Place{rank, size, true} : Place{});
    return capture.id == 0 ? run(steps, stream) : add_placeholder(steps, stream, capture);
  }

  // Who else has the colour is what the other ranks would tell.  Until the caller declares it, the child has its
  // parent's size and rank, and its collectives touch the first slot only.
  ncclResult_t split(int color, int, const Config &child_config, std::unique_ptr<ncclComm> *child) override {
    if (color == kNoColor) return ncclSuccess;
    log(1, "a split of %d ranks makes a communicator of unknown size: declare it", size);
    *child = std::make_unique<FakeCommunicator>(Shape{size, rank, device, context, child_config}, size == 1);
    return ncclSuccess;
  }

  ncclResult_t shrink(const std::vector<int> &excluded, const Config &child_config,
                      std::unique_ptr<ncclComm> *child) override {
    const auto below = std::ranges::lower_bound(excluded, rank) - excluded.begin();
    const Shape shape{size - static_cast<int>(excluded.size()), rank - static_cast<int>(below), device, context,
                      child_config};
    *child = std::make_unique<FakeCommunicator>(shape, known_);
    return ncclSuccess;
  }

  ncclResult_t declare(int true_size, int true_rank) override {
    if (known_ && (true_size != size || true_rank != rank)) {
      return fail(ncclInvalidArgument,
                  "the communicator is declared as rank %d of %d and is rank %d of %d: correct the ranks", true_rank,
                  true_size, rank, size);
    }
    size = true_size;
    rank = true_rank;
    known_ = true;
    return ncclSuccess;
  }

  ncclResult_t flush() override { return ncclSuccess; }
  void stop() override {}
  ncclResult_t async_error() override { return ncclSuccess; }
  const char *async_message() override { return ""; }

 private:
  static ncclResult_t run(const std::vector<Step> &steps, CUstream stream) {
    for (const Step &step : steps) {
      if (step.from == 0) {
        NCCL_TRY(CU(cuMemsetD8Async, step.to, static_cast<unsigned char>(0), step.bytes, stream));
      } else {
        NCCL_TRY(CU(cuMemcpyDtoDAsync, step.to, step.from, step.bytes, stream));
      }
    }
    return ncclSuccess;
  }

  // One node, whatever the group holds, so that it can be found and replaced: a child graph.
  ncclResult_t add_placeholder(const std::vector<Step> &steps, CUstream stream, const Capture &capture) const {
    CUgraph child = nullptr;
    NCCL_TRY(CU(cuGraphCreate, &child, 0u));
    ncclResult_t result = fill_graph(steps, child, context);
    CUgraphNode node = nullptr;
    if (result == ncclSuccess) {
      result =
          CU(cuGraphAddChildGraphNode, &node, capture.graph, capture.frontier.data(), capture.frontier.size(), child);
    }
    const ncclResult_t destroyed = CU(cuGraphDestroy, child);  // the node has its own copy
    NCCL_TRY(result);
    NCCL_TRY(destroyed);
    return set_frontier(stream, {node});
  }

  bool known_;  // whether size and rank are the true ones
};

}  // namespace
}  // namespace fake

ncclResult_t make_communicator(const Shape &shape, const ncclUniqueId &, std::unique_ptr<ncclComm> *out) {
  *out = std::make_unique<fake::FakeCommunicator>(shape, true);
  return ncclSuccess;
}

}  // namespace ncclstub
