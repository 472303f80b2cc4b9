// SPDX-License-Identifier: Apache-2.0
//
// The exported names: pncclX strong, ncclX a weak alias of it, nothing written twice.  No exception leaves here.
#include <exception>
#include <new>

#include "api.h"
#include "error.h"

namespace {

template <class Call>
ncclResult_t guarded(const char *name, Call &&call) noexcept {
  try {
    return call();
  } catch (const std::bad_alloc &) {
    return ncclstub::fail(ncclSystemError, "%s found no host memory: free some", name);
  } catch (const std::exception &error) {
    return ncclstub::fail(ncclInternalError, "%s failed: %s", name, error.what());
  }
}

void refuse(const char *name) {
  ncclstub::fail(ncclInvalidUsage, "%s is not provided by this library, only by NVIDIA's: do without it here", name);
}

using result_type = ncclResult_t;
using number_type = int;
using team_type = ncclTeam_t;
using nothing_type = void;

result_type refused_result() {
  return ncclInvalidUsage;
}
number_type refused_number() {
  return -1;
}
team_type refused_team() {
  return {};
}
nothing_type refused_nothing() {}

}  // namespace

#define NCCLSTUB_EXPORT extern "C" __attribute__((visibility("default")))
#define NCCLSTUB_ALIAS(name) __attribute__((visibility("default"), weak, alias("p" #name)))

#define NCCL_FUNCTION(name, parameters, arguments)                        \
  NCCLSTUB_EXPORT ncclResult_t p##name parameters {                       \
    return guarded(#name, [&] { return ncclstub::api::name arguments; }); \
  }                                                                       \
  extern "C" ncclResult_t name parameters NCCLSTUB_ALIAS(name);
#define NCCL_TEXT(name, parameters, arguments)     \
  NCCLSTUB_EXPORT const char *p##name parameters { \
    return ncclstub::api::name arguments;          \
  }                                                \
  extern "C" const char *name parameters NCCLSTUB_ALIAS(name);
#define NCCL_REFUSED(kind, name)          \
  NCCLSTUB_EXPORT kind##_type p##name() { \
    refuse(#name);                        \
    return refused_##kind();              \
  }                                       \
  extern "C" kind##_type name() NCCLSTUB_ALIAS(name);
#include "functions.def"

NCCLSTUB_EXPORT ncclResult_t foundryd_nccl_declare(ncclComm_t comm, int size, int rank) {
  return guarded("foundryd_nccl_declare", [&] { return ncclstub::api::declare(comm, size, rank); });
}
