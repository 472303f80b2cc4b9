// SPDX-License-Identifier: Apache-2.0
//
// What the software driver exports beyond the driver API.  Found with dlsym on the driver's handle.
#ifndef SOFTCUDA_COUNTERS_H
#define SOFTCUDA_COUNTERS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SOFTCUDA_OWNER_ENGINE = 0, SOFTCUDA_OWNER_COMMUNICATION = 1, SOFTCUDA_OWNER_COUNT = 2 };

// Successful calls since the process started, by who made them.
typedef struct softcuda_counter_values {
  uint64_t launches;  // kernel launches, captured ones included
  uint64_t captures;  // stream captures begun
  uint64_t graph_launches;
  uint64_t instantiations;
  uint64_t module_loads;  // modules and libraries
  uint64_t allocations;   // device memory: cuMemAlloc*, cuMemCreate
} softcuda_counter_values;

// Attributes the driver calls of the calling thread from now on.  0 (engine) at the start of a thread; an unknown
// owner is taken as the engine.
void softcuda_set_owner(uint32_t owner);

// 0, or 1 if `owner` is unknown or `out` is null.
int softcuda_counters(uint32_t owner, softcuda_counter_values *out);

// Whether page faults in calls are counted from now on, which takes two system calls for each; at first they are not.
void softcuda_count_faults(uint32_t on);

// Page faults of the calling thread, those without input or output, inside of calls while they were counted: what the
// thread has beside these is not the driver's.
uint64_t softcuda_faults(void);

#ifdef __cplusplus
}
#endif

#endif  // SOFTCUDA_COUNTERS_H
