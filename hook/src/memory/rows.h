// SPDX-License-Identifier: Apache-2.0
//
// Shared by the files of memory overrides.
#ifndef FOUNDRYD_HOOK_MEMORY_ROWS_H
#define FOUNDRYD_HOOK_MEMORY_ROWS_H

#include "interpose/table.h"
#include "memory/foreign.h"
#include "memory/state.h"
#include "support/captures.h"
#include "support/counters.h"
#include "support/driver.h"
#include "support/error.h"
#include "support/mode.h"
#include "support/owner.h"

namespace foundryd::memory {

// Whether an allocation of the calling thread belongs into the arenas.  What a communication library allocates is state
// of its rank and stays with the driver, as does anything on another device than the session's.  Throws Error.
inline bool for_arenas() {
  CUdevice device = 0;
  return !communicating() && FDY_CU_RESULT(cuCtxGetDevice, &device) == CUDA_SUCCESS &&
         Arenas::instance().serves(device);
}

// An allocation's owner: the thread's, or the library that calls.
#define FDY_OWNER_OF_CALL() \
  const ::foundryd::CommunicationScope owner_of_call(::foundryd::is_communication_library(__builtin_return_address(0)))

// Counts what succeeded.
inline CUresult counted(CUresult result) noexcept {
  if (result == CUDA_SUCCESS) count(&fdy_counters::allocations);
  return result;
}

// Remembers memory that the arenas did not serve.
inline CUresult outside(CUresult result, uint64_t address, uint64_t bytes) {
  if (result == CUDA_SUCCESS && capturing())
    foreign::add(address, bytes, communicating() ? foreign::Kind::communication : foreign::Kind::other_device);
  return counted(result);
}

}  // namespace foundryd::memory

#endif  // FOUNDRYD_HOOK_MEMORY_ROWS_H
