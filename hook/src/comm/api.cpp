// SPDX-License-Identifier: Apache-2.0
//
// The part of the fdy_hook table that is about communication.
#include <vector>

#include "comm/reissue.h"
#include "comm/state.h"
#include "interpose/concepts.h"
#include "modules/strings.h"
#include "support/buffer.h"
#include "support/error.h"

namespace foundryd::comm {
namespace {

void require(bool condition, const char *what) {
  if (!condition) throw Error(FDY_ERROR_INVALID, "%s is NULL: pass one", what);
}

int api_declare(void *communicator, const uint32_t *ranks, uint64_t count) {
  return guard_api([&] {
    require(ranks || count == 0, "the ranks");
    State::get().declare(static_cast<NcclComm>(communicator), {ranks, count});
  });
}

int api_communicators(fdy_buffer *communicators, fdy_buffer *ranks) {
  return guard_api([&] {
    require(communicators && ranks, "a buffer");
    std::vector<fdy_communicator> rows;
    std::vector<uint32_t> members;
    State::get().list(rows, members);
    modules::fill_buffers(std::pair{communicators, &rows}, std::pair{ranks, &members});
  });
}

int api_ops(fdy_buffer *out) {
  return guard_api([&] {
    require(out != nullptr, "the buffer");
    fill_buffer(out, State::get().ops());
  });
}

int api_reissue(const fdy_comm_op *ops, uint64_t count, void **graph) {
  return guard_api([&] {
    require((ops || count == 0) && graph, "the calls or the result");
    *graph = reissue({ops, count});
  });
}

}  // namespace

void fill(fdy_hook &table) {
  table.comm_declare = api_declare;
  table.communicators = api_communicators;
  table.comm_ops = api_ops;
  table.comm_reissue = api_reissue;
}

}  // namespace foundryd::comm
