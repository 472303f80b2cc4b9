// SPDX-License-Identifier: Apache-2.0
//
// What the C programs of the tests share.  They declare the driver's functions themselves, as programs do that know them
// by name only.
#ifndef FOUNDRYD_TESTS_PROBE_H
#define FOUNDRYD_TESTS_PROBE_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned long long ptr;
typedef int (*init_fn)(unsigned);
typedef int (*retain_fn)(void **, int);
typedef int (*current_fn)(void *);
typedef int (*alloc_fn)(ptr *, size_t);
typedef int (*address_fn)(const char *, void **, int, unsigned long long, int *);
#define CHECK(call) do { int r_ = (call); if (r_) { fprintf(stderr, "%s: %d\n", #call, r_); exit(1); } } while (0)
static const char *object_of(void *p) {
  Dl_info info;
  if (!p || !dladdr(p, &info)) return "none";
  const char *slash = strrchr(info.dli_fname, '/');
  return slash ? slash + 1 : info.dli_fname;
}

#endif  // FOUNDRYD_TESTS_PROBE_H
