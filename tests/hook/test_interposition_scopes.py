# SPDX-License-Identifier: Apache-2.0
"""Lookups mean what they meant: the caller's scope, other interposers, old drivers, lookups inside malloc."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HOOK = "libfoundryd_hook.so"

Compile = Callable[..., Path]

PROLOGUE = '#include "probe.h"\n'

SCOPES = (
    PROLOGUE
    + """
int main(int argc, char **argv) {
  const char *name = argv[1];
  if (argc > 2) { if (!dlopen(argv[2], RTLD_NOW | RTLD_LOCAL)) { fprintf(stderr, "%s\\n", dlerror()); return 1; } }
  dlerror();
  void *found = dlsym(RTLD_DEFAULT, name);
  const char *reason = dlerror();
  printf("%s %d ", object_of(found), reason != NULL);
  found = dlvsym(RTLD_DEFAULT, name, "GLIBC_2.2.5");
  printf("%s ", object_of(found));
  found = dlsym(dlopen(NULL, RTLD_NOW), name);
  printf("%s\\n", object_of(found));
}
"""
)


def test_rtld_default_does_not_find_a_driver_that_is_not_there(hooked: Any, compile_c: Compile) -> None:
    program = compile_c("scopes", SCOPES)
    assert hooked.program([program, "cuMemAlloc_v2"], "capture").stdout.split() == ["none", "1", "none", "none"]
    seen = hooked.program([program, "cuMemAlloc_v2", "libcuda.so.1"], "capture").stdout.split()
    assert seen == [HOOK, "0", "none", HOOK]  # no driver has a symbol of that version
    assert hooked.program([program, "cuNoSuch", "libcuda.so.1"], "capture").stdout.split()[0] == "none"


def test_versioned_lookups_stay_right(hooked: Any, compile_c: Compile) -> None:
    program = compile_c(
        "versioned",
        PROLOGUE
        + """
int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  void *clock = dlopen("libc.so.6", RTLD_NOW);
  printf("%s ", object_of(dlvsym(driver, "cuMemFree_v2", "NONE_1.0")));
  printf("%s\\n", object_of(dlvsym(clock, "memcpy", "GLIBC_2.14")));
}
""",
    )
    without = hooked.program([program], None, hook=False).stdout.split()
    assert without[1] == "libc.so.6"
    # Whether a driver without versions answers is the C library's business.
    expected = [HOOK if without[0] == "libcuda.so.1" else without[0], without[1]]
    assert hooked.program([program], "capture").stdout.split() == expected


# An interposer of somebody else's, behind the hook.
WRAPPER = (
    PROLOGUE
    + """
int calls_retain, calls_alloc;
static void *next(const char *name) {
  const char *how = getenv("WRAPPER_FINDS_BY");
  return dlsym(how && !strcmp(how, "handle") ? dlopen("libcuda.so.1", RTLD_NOW) : RTLD_NEXT, name);
}
int cuDevicePrimaryCtxRetain(void **c, int d) {
  ++calls_retain;
  return ((retain_fn)next("cuDevicePrimaryCtxRetain"))(c, d);
}
int cuMemAlloc_v2(ptr *a, size_t n) { ++calls_alloc; return ((alloc_fn)next("cuMemAlloc_v2"))(a, n); }
const char *next_object(void) { return object_of(dlsym(RTLD_NEXT, "cuMemAlloc_v2")); }
"""
)

WRAPPED = (
    PROLOGUE
    + """
int cuInit(unsigned); int cuDevicePrimaryCtxRetain(void **, int); int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(ptr *, size_t);
extern int calls_retain, calls_alloc;
const char *next_object(void);
int main(void) {
  void *context; ptr a;
  CHECK(cuInit(0)); CHECK(cuDevicePrimaryCtxRetain(&context, 0)); CHECK(cuCtxSetCurrent(context));
  CHECK(cuMemAlloc_v2(&a, 4096));
  printf("%d %d %s\\n", calls_retain, calls_alloc, next_object());
}
"""
)


@pytest.mark.parametrize("by", ["next", "handle"])
def test_another_interposer_keeps_its_place(hooked: Any, compile_c: Compile, by: str) -> None:
    wrapper = compile_c("libwrapper.so", WRAPPER)
    program = compile_c("wrapped", WRAPPED, cuda=True, libraries=[wrapper])
    env = {"WRAPPER_FINDS_BY": by}

    def run(mode: str | None, hook: bool) -> str:
        return str(hooked.program([program], mode, env=env, preload=[wrapper], hook=hook).stdout)

    without = run(None, hook=False)
    assert without.split() == ["1", "1", "libcuda.so.1"]
    assert run(None, hook=True) == without
    # Under a mode the arena serves cuMemAlloc_v2, and what the hook passes on still goes through the wrapper, once.
    assert run("capture", hook=True).split() == ["1", "0", "libcuda.so.1"]


def test_rtld_next_means_next_to_the_caller(hooked: Any, compile_c: Compile) -> None:
    """A library opened with a private scope finds what its own dependency defines, as it would without the hook."""
    provider = compile_c("libprovider.so", "int probe_value(void) { return 42; }")
    plugin = compile_c(
        "libplugin.so",
        """
        #include <dlfcn.h>
        int probe_value(void) { return ((int (*)(void))dlsym(RTLD_NEXT, "probe_value"))() + 1; }
        int default_scope(void) { int (*f)(void) = dlsym(RTLD_DEFAULT, "probe_value"); return f ? f() : -1; }
        """,
        libraries=[provider],
    )
    program = compile_c(
        "user",
        """
        #include <dlfcn.h>
        #include <stdio.h>
        int main(int argc, char **argv) {
          void *plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
          if (!plugin) { puts(dlerror()); return 1; }
          int (*value)(void) = dlsym(plugin, "probe_value"), (*scope)(void) = dlsym(plugin, "default_scope");
          printf("%d %d %d\\n", value(), scope(), dlsym(RTLD_DEFAULT, "probe_value") != NULL);
        }
        """,
    )
    without = hooked.program([program, plugin], None, hook=False).stdout
    assert without.split() == ["43", "43", "0"]
    assert hooked.program([program, plugin], "capture").stdout == without
    assert hooked.program([program, plugin], None).stdout == without


def test_an_allocator_that_looks_itself_up_inside_malloc_works(hooked: Any, compile_c: Compile) -> None:
    """Such libraries call dlsym before anything is set up, from the very first malloc of the process."""
    allocator = compile_c(
        "liballocator.so",
        """
        #include <dlfcn.h>
        #include <stddef.h>
        static void *(*real)(size_t);
        static __thread int inside;
        int count;
        static char arena[65536]; static size_t used;
        void *malloc(size_t n) {
          if (inside) { void *p = arena + used; used += (n + 15) & ~15ul; return p; }
          if (!real) { inside = 1; real = dlsym(RTLD_NEXT, "malloc"); inside = 0; }
          ++count;
          return real(n);
        }
        """,
    )
    done = hooked.program(["/bin/sh", "-c", "echo works"], "capture", preload=[allocator])
    assert done.stdout == "works\n"


def test_a_failed_lookup_keeps_its_reason(hooked: Any, compile_c: Compile) -> None:
    program = compile_c(
        "reasons",
        PROLOGUE
        + """
int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  dlerror();
  dlsym(driver, "cuNoSuchFunction");
  const char *reason = dlerror();
  printf("%d ", reason && strstr(reason, "cuNoSuchFunction"));
  void *found = dlsym(driver, "cuMemAlloc_v2");
  printf("%d %d\\n", found != NULL, dlerror() == NULL);
}
""",
    )
    assert hooked.program([program], "capture").stdout.split() == ["1", "1", "1"]


OLD_DRIVER = """
typedef unsigned long long ptr;
int count;
int cuInit(unsigned f) { return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &count; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuMemAlloc_v2(ptr *a, unsigned long n) { ++count; *a = 4096; return 0; }
int cuMemAllocManaged(ptr *a, unsigned long n, unsigned f) { return cuMemAlloc_v2(a, n); }  // through its own export
int allocations(void) { return count; }
"""


def test_a_driver_that_calls_its_own_exports_meets_itself(hooked: Any, compile_c: Compile, tmp_path: Path) -> None:
    driver = compile_c("libcuda.so.1.so", OLD_DRIVER)
    (tmp_path / "libcuda.so.1").symlink_to(driver)
    program = compile_c(
        "managed",
        PROLOGUE
        + """
int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *context; ptr a = 0, b = 0;
  CHECK(((retain_fn)dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0));
  CHECK(((int (*)(ptr *, size_t, unsigned))dlsym(driver, "cuMemAllocManaged"))(&a, 64, 1));
  int refused = ((alloc_fn)dlsym(driver, "cuMemAlloc_v2"))(&b, 64);
  printf("%llu %d %d\\n", a, refused, ((int (*)(void))dlsym(driver, "allocations"))());
}
""",
    )
    done = hooked.program([program], "capture", env={"LD_LIBRARY_PATH": str(tmp_path)})
    # The arenas cannot be made on such a driver: the second allocation fails with the reason, and reached nobody.
    assert done.stdout.split() == ["4096", "205", "1"]
    assert "address space" in done.stderr


def test_a_function_that_the_driver_lacks_is_not_found(hooked: Any, compile_c: Compile, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(compile_c("libcuda.so.1.so", OLD_DRIVER))
    program = compile_c("scopes", SCOPES)
    for mode in ("capture", None):
        done = hooked.program([program, "cuCtxCreate_v4", "libcuda.so.1"], mode, env={"LD_LIBRARY_PATH": str(tmp_path)})
        assert done.stdout.split() == ["none", "1", "none", "none"]
