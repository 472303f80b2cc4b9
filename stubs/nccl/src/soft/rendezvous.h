// SPDX-License-Identifier: Apache-2.0
//
// How the ranks of a communicator find each other: a segment of shared memory named after the unique id's token.
//
// The first to come makes it, exclusively; each rank locks its own byte of it; the last to come removes the name.  From
// then on nothing is left in /dev/shm however the processes end.  A rank that gives up waiting removes the name too.
// What processes leave that were all killed before that, the next one that makes a segment removes: nobody holds a
// lock on it any more.
#ifndef NCCLSTUB_SOFT_RENDEZVOUS_H
#define NCCLSTUB_SOFT_RENDEZVOUS_H

#include <array>
#include <memory>

#include "error.h"
#include "ncclstub/soft_state.h"

namespace ncclstub::soft {

using Token = std::array<uint8_t, 16>;

// Unmaps and closes at the end.
std::shared_ptr<CommState> make_state();

// Blocks until all ranks are in.
ncclResult_t join(const Token &token, uint32_t rank, uint32_t size, std::shared_ptr<CommState> *out);

// A token that all ranks derive alike from their communicator's and from what they are about to make.
Token derive(const Token &parent, const void *salt, size_t bytes);

}  // namespace ncclstub::soft

#endif  // NCCLSTUB_SOFT_RENDEZVOUS_H
