// SPDX-License-Identifier: Apache-2.0
//
// What a group leaves in memory when no peer is alive.  Warm-up kernels read it (router scores, expert ids, gathered
// vocabularies), so it must be data and not whatever was there.  The picture is that every peer is a copy of this
// rank, except that nothing is read that NCCL would not read:
//
//   all-reduce, reduce         the rank's own input (an operator's scalar is not applied)
//   all-gather, gather         the own input in every slot
//   reduce-scatter, scatter    the own slice of the own input
//   all-to-all                 the own slice in every slot
//   broadcast, scatter off the root, receive    zero: the source is another rank's memory
//   receive from itself        what the same group sends to itself
#ifndef NCCLSTUB_FAKE_PLAN_H
#define NCCLSTUB_FAKE_PLAN_H

#include <vector>

#include "communicator.h"

namespace ncclstub::fake {

struct Step {
  CUdeviceptr to;
  CUdeviceptr from;  // 0: zero-fill
  size_t bytes;
};

// Whose plan it is.  Of a communicator whose true size and rank are unknown only the first slot surely exists, and no
// root is known.
struct Place {
  int rank = 0;
  int size = 1;
  bool known = false;
};

// In order, each after the one before.
std::vector<Step> make_plan(const std::vector<Task> &tasks, const Place &place);

}  // namespace ncclstub::fake

#endif  // NCCLSTUB_FAKE_PLAN_H
