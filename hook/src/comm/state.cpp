// SPDX-License-Identifier: Apache-2.0
#include "comm/state.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

#include "interpose/table.h"
#include "support/error.h"
#include "support/mode.h"
#include "support/owner.h"
#include "support/real_dl.h"

namespace foundryd::comm {

State &State::get() {
  static auto *state = new State;  // never destroyed: NCCL may call until the process is gone
  return *state;
}

void State::created(NcclComm communicator, uint32_t size, uint32_t rank) {
  if (communicator == nullptr) return;  // a split without a colour
  const std::lock_guard lock(mutex_);
  const auto slot = static_cast<uint32_t>(communicators_.size());
  communicators_.push_back({communicator, size, rank, size == 0, true, FDY_NONE, {}, std::make_shared<Lane>()});
  slots_[communicator] = slot;
}

void State::destroyed(NcclComm communicator) {
  const std::lock_guard lock(mutex_);
  const auto it = slots_.find(communicator);
  if (it == slots_.end()) return;
  communicators_[it->second].live = false;
  slots_.erase(it);
}

// Split and Shrink do not say how large the child is, and a non-blocking one knows only later.
void State::ask(Communicator &communicator) {
  if (communicator.size != 0 || !communicator.live) return;
  const CommunicationScope scope;
  int size = 0, rank = 0;
  if (FDY_NEXT(ncclCommCount, communicator.handle, &size) == kNcclSuccess &&
      FDY_NEXT(ncclCommUserRank, communicator.handle, &rank) == kNcclSuccess && size > 0) {
    communicator.size = static_cast<uint32_t>(size);
    communicator.rank = static_cast<uint32_t>(rank);
  }
}

// Without its peers the stub takes a child to be as large as its parent.
void State::tell_stub(Communicator &communicator, std::span<const uint32_t> ranks) {
  using Declare = NcclResult (*)(NcclComm, int, int);
  const auto declare = reinterpret_cast<Declare>(real_dlsym()(RTLD_DEFAULT, "foundryd_nccl_declare"));
  if (declare == nullptr) return;  // not a stub: what it says of the size is true
  const char *text = std::getenv("RANK");
  const auto world_rank = static_cast<uint32_t>(text == nullptr ? 0 : std::strtoul(text, nullptr, 10));
  const auto place = std::find(ranks.begin(), ranks.end(), world_rank);
  if (place == ranks.end())
    throw Error(FDY_ERROR_INVALID,
                "this process is world rank %u (RANK), which is not among the %zu declared ranks of "
                "communicator %p: declare the ranks of its colour",
                world_rank, ranks.size(), static_cast<void *>(communicator.handle));
  const auto rank = static_cast<uint32_t>(place - ranks.begin());
  const CommunicationScope scope;
  const NcclResult result = declare(communicator.handle, static_cast<int>(ranks.size()), static_cast<int>(rank));
  if (result != kNcclSuccess) throw Error::nccl(result, "foundryd_nccl_declare");
  communicator.size = static_cast<uint32_t>(ranks.size());
  communicator.rank = rank;
}

void State::declare(NcclComm communicator, std::span<const uint32_t> ranks) {
  const std::lock_guard lock(mutex_);
  if (communicator == nullptr && !capturing()) {
    ++declarations_;
    return;
  }
  const auto it = slots_.find(communicator);
  if (it == slots_.end())
    throw Error(FDY_ERROR_NOT_FOUND,
                "communicator %p was not seen being made or is destroyed: declare it after its "
                "creation, with the hook loaded first",
                static_cast<void *>(communicator));
  Communicator &c = communicators_[it->second];
  ask(c);
  if (capturing() && c.derived && !ranks.empty()) tell_stub(c, ranks);
  if (ranks.empty() || (c.size != 0 && c.size != ranks.size()))
    throw Error(FDY_ERROR_INVALID, "communicator %p has %u ranks and %zu were declared: declare each of its ranks",
                static_cast<void *>(communicator), c.size, ranks.size());
  std::vector<uint32_t> sorted(ranks.begin(), ranks.end());
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    throw Error(FDY_ERROR_INVALID, "world rank %u was declared twice for communicator %p", *twice,
                static_cast<void *>(communicator));
  c.members.assign(ranks.begin(), ranks.end());
  if (c.declared == FDY_NONE) c.declared = declarations_++;
}

void State::list(std::vector<fdy_communicator> &communicators, std::vector<uint32_t> &ranks) {
  const std::lock_guard lock(mutex_);
  for (uint32_t slot = 0; slot < communicators_.size(); ++slot) {
    Communicator &c = communicators_[slot];
    ask(c);
    communicators.push_back({slot, c.size, c.rank, c.live ? 1u : 0u, reinterpret_cast<uintptr_t>(c.handle),
                             static_cast<uint32_t>(ranks.size()), static_cast<uint32_t>(c.members.size()), c.declared,
                             0});
    ranks.insert(ranks.end(), c.members.begin(), c.members.end());
  }
}

uint32_t State::slot_of(NcclComm communicator) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = slots_.find(communicator); it != slots_.end()) return it->second;
  }
  created(communicator, 0, 0);
  const std::lock_guard lock(mutex_);
  return slots_.at(communicator);
}

uint32_t State::size_of(uint32_t slot) {
  const std::lock_guard lock(mutex_);
  ask(communicators_.at(slot));
  return communicators_[slot].size;
}

LiveCommunicator State::live(uint32_t slot) {
  const std::lock_guard lock(mutex_);
  if (slot >= communicators_.size())
    throw Error(FDY_ERROR_INVALID, "communicator slot %u does not exist: this process has made %zu communicators", slot,
                communicators_.size());
  const Communicator &c = communicators_[slot];
  if (!c.live)
    throw Error(FDY_ERROR_STATE, "the communicator of slot %u is destroyed: its calls cannot be issued", slot);
  return {c.handle, slot, c.lane};
}

uint32_t State::next_group() {
  const std::lock_guard lock(mutex_);
  return groups_++;
}

void State::add_ops(std::span<const fdy_comm_op> ops) {
  const std::lock_guard lock(mutex_);
  ops_.insert(ops_.end(), ops.begin(), ops.end());
}

std::vector<fdy_comm_op> State::ops() const {
  const std::lock_guard lock(mutex_);
  return ops_;
}

}  // namespace foundryd::comm
