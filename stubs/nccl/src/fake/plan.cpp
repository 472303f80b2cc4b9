// SPDX-License-Identifier: Apache-2.0
#include "fake/plan.h"

#include <algorithm>
#include <deque>

namespace ncclstub::fake {
namespace {

class Plan {
 public:
  void copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    if (to != from) steps_.push_back({to, from, bytes});
  }
  void zero(CUdeviceptr to, size_t bytes) { steps_.push_back({to, 0, bytes}); }

  // `count` slots of `bytes`, all equal to `from`.  The filled part doubles, so 64 slots are 7 copies.
  void fill(CUdeviceptr to, CUdeviceptr from, size_t bytes, size_t count) {
    copy(to, from, bytes);
    for (size_t filled = 1; filled < count;) {
      const size_t more = std::min(filled, count - filled);
      copy(to + filled * bytes, to, more * bytes);
      filled += more;
    }
  }

  std::vector<Step> take() { return std::move(steps_); }

 private:
  std::vector<Step> steps_;
};

}  // namespace

std::vector<Step> make_plan(const std::vector<Task> &tasks, const Place &place) {
  const auto is_own = [&](int peer) { return place.known && peer == place.rank; };
  Plan plan;
  std::deque<CUdeviceptr> own_sends;  // to this rank itself, in order
  for (const Task &task : tasks) {
    if (task.kind == OpKind::send && is_own(task.peer)) own_sends.push_back(reinterpret_cast<CUdeviceptr>(task.send));
  }
  for (const Task &task : tasks) {
    const auto send = reinterpret_cast<CUdeviceptr>(task.send);
    const auto recv = reinterpret_cast<CUdeviceptr>(task.recv);
    const size_t bytes = task.count * type_bytes(task.type);
    const auto slots = static_cast<size_t>(place.size);
    const CUdeviceptr own_slice = send + static_cast<size_t>(place.rank) * bytes;
    const bool root = is_own(task.peer);
    switch (task.kind) {
      case OpKind::all_reduce:
        plan.copy(recv, send, bytes);
        break;
      case OpKind::reduce:
        if (root) plan.copy(recv, send, bytes);
        break;
      case OpKind::reduce_scatter:
        plan.copy(recv, own_slice, bytes);
        break;
      case OpKind::all_gather:
        plan.fill(recv, send, bytes, slots);
        break;
      case OpKind::gather:
        if (root) plan.fill(recv, send, bytes, slots);
        break;
      case OpKind::all_to_all:
        plan.fill(recv, own_slice, bytes, slots);
        break;
      case OpKind::broadcast:
        root ? plan.copy(recv, send, bytes) : plan.zero(recv, bytes);
        break;
      case OpKind::scatter:
        root ? plan.copy(recv, own_slice, bytes) : plan.zero(recv, bytes);
        break;
      case OpKind::recv:
        if (root && !own_sends.empty()) {
          plan.copy(recv, own_sends.front(), bytes);
          own_sends.pop_front();
        } else {
          plan.zero(recv, bytes);
        }
        break;
      case OpKind::send:
        break;
    }
  }
  return plan.take();
}

}  // namespace ncclstub::fake
