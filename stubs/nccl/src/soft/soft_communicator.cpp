// SPDX-License-Identifier: Apache-2.0
//
// The life of a communicator.  launch.cpp has its kernels.
#include "soft/soft_communicator.h"

#include <algorithm>
#include <cstring>

#include "ncclstub/soft_wait.h"
#include "unique_id.h"

namespace ncclstub {

const bool kInitBlocks = true;

bool can_reduce(ncclDataType_t type) {
  return type <= ncclBfloat16;
}

ncclResult_t make_communicator(const Shape &shape, const ncclUniqueId &id, std::unique_ptr<ncclComm> *out) {
  IdContent content;
  std::memcpy(&content, id.internal, sizeof content);
  if (content.magic != kIdMagic) {
    return fail(ncclInvalidArgument,
                "the unique id begins with 0x%llx, not 0x%llx: get it from this library's ncclGetUniqueId",
                static_cast<unsigned long long>(content.magic), static_cast<unsigned long long>(kIdMagic));
  }
  soft::Token token;
  std::memcpy(token.data(), content.token, token.size());
  return soft::SoftCommunicator::make(shape, token, out);
}

namespace soft {
namespace {

// States whose kernels may still be running because their stream could not be waited for.
void abandon(std::shared_ptr<CommState> state) {
  static std::mutex mutex;
  static auto *const kept = new std::vector<std::shared_ptr<CommState>>;  // kernels may outlive static destructors
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(state));
}

}  // namespace

ncclResult_t SoftCommunicator::make(const Shape &shape, const Token &token, std::unique_ptr<ncclComm> *out) {
  auto comm = std::make_unique<SoftCommunicator>();
  comm->size = shape.size;
  comm->rank = shape.rank;
  comm->device = shape.device;
  comm->context = shape.context;
  comm->config = shape.config;
  comm->token_ = token;
  NCCL_TRY(load_kernel(&comm->function_));
  NCCL_TRY(CU(cuEventCreate, &comm->serial_, static_cast<unsigned>(CU_EVENT_DISABLE_TIMING)));
  NCCL_TRY(join(token, static_cast<uint32_t>(shape.rank), static_cast<uint32_t>(shape.size), &comm->state_));
  *out = std::move(comm);
  return ncclSuccess;
}

SoftCommunicator::~SoftCommunicator() {
  if (serial_ != nullptr) CU(cuEventDestroy, serial_);
  if (state_ == nullptr) return;
  state_->destroyed = true;
  RankCell &cell = state_->segment->cell(state_->rank);
  raise(cell.left, 1);
  // Peers sleep on these.
  wake(cell.steps);
  wake(cell.host_steps);
  if (!flushed_) abandon(state_);
}

ncclResult_t SoftCommunicator::flush() {
  const ncclResult_t result = CU(cuEventSynchronize, serial_);
  flushed_ = result == ncclSuccess;
  return result;
}

ncclResult_t SoftCommunicator::async_error() {
  return static_cast<ncclResult_t>(state_->error.load());
}

const char *SoftCommunicator::async_message() {
  return state_->error != ncclSuccess ? state_->message : "";
}

ncclResult_t SoftCommunicator::declare(int true_size, int true_rank) {
  if (true_size == size && true_rank == rank) return ncclSuccess;
  return fail(ncclInvalidArgument,
              "the communicator is declared as rank %d of %d and is rank %d of %d: correct the ranks", true_rank,
              true_size, rank, size);
}

ncclResult_t SoftCommunicator::meet_on_host() {
  Segment &segment = *state_->segment;
  Word &own = segment.cell(state_->rank).host_steps;
  const uint32_t target = own.load(std::memory_order_relaxed) + 1;
  raise(own, target);
  for (uint32_t peer = 0; peer < state_->size; ++peer) {
    const Waited waited = wait_for(*state_, peer, segment.cell(peer).host_steps, target, "a split");
    if (waited == Waited::failed) return fail(async_error(), "%s", async_message());
    if (waited == Waited::stopped) {
      return fail(ncclInvalidUsage, "the communicator was aborted while it was split: make another one");
    }
  }
  return ncclSuccess;
}

ncclResult_t SoftCommunicator::split(int color, int key, const Config &child_config, std::unique_ptr<ncclComm> *child) {
  Segment &segment = *state_->segment;
  RankCell &own = segment.cell(state_->rank);
  own.color = color;
  own.key = key;
  NCCL_TRY(meet_on_host());
  std::vector<std::pair<int, uint32_t>> members;  // by key, then by rank
  for (uint32_t peer = 0; peer < state_->size; ++peer) {
    const RankCell &cell = segment.cell(peer);
    if (cell.color == color) members.emplace_back(cell.key, peer);
  }
  NCCL_TRY(meet_on_host());  // all have read: the cells may change again
  if (color == kNoColor) return ncclSuccess;
  std::ranges::sort(members);
  const auto place = std::ranges::find(members, state_->rank, &std::pair<int, uint32_t>::second) - members.begin();
  const uint32_t salt[] = {0x73706c74, own.host_steps.load(), static_cast<uint32_t>(color)};
  const Shape shape{static_cast<int>(members.size()), static_cast<int>(place), device, context, child_config};
  return make(shape, derive(token_, salt, sizeof salt), child);
}

ncclResult_t SoftCommunicator::shrink(const std::vector<int> &excluded, const Config &child_config,
                                      std::unique_ptr<ncclComm> *child) {
  const auto below = std::ranges::lower_bound(excluded, rank) - excluded.begin();
  const Shape shape{size - static_cast<int>(excluded.size()), rank - static_cast<int>(below), device, context,
                    child_config};
  std::vector<int> salt = {0x7368726b, shrinks_++};
  salt.insert(salt.end(), excluded.begin(), excluded.end());
  return make(shape, derive(token_, salt.data(), salt.size() * sizeof(int)), child);
}

}  // namespace soft
}  // namespace ncclstub
