// SPDX-License-Identifier: Apache-2.0
//
// How a failure is reported: `fail` keeps the sentence for ncclGetLastError, logs it, and returns the code.
#ifndef NCCLSTUB_ERROR_H
#define NCCLSTUB_ERROR_H

#include "ncclstub/abi.h"

namespace ncclstub {

// Keeps and logs one sentence (cause, both values, what to do) and returns `result`.
[[gnu::format(printf, 2, 3)]] ncclResult_t fail(ncclResult_t result, const char *format, ...);

// The last sentence of any thread, "" if none.  Valid until the calling thread asks again.
const char *last_error();

// A line on standard error at level warning (2) or info (1), if FOUNDRYD_LOG lets it through.
[[gnu::format(printf, 2, 3)]] void log(int level, const char *format, ...);

const char *result_name(ncclResult_t result);

}  // namespace ncclstub

#define NCCL_TRY(expression)                                                                        \
  do {                                                                                              \
    if (const ncclResult_t try_result = (expression); try_result != ncclSuccess) return try_result; \
  } while (0)

#endif  // NCCLSTUB_ERROR_H
