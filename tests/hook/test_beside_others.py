# SPDX-License-Identifier: Apache-2.0
"""The hook beside other preloaded libraries, in any order, and in every kind of child."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from foundryd.capture.runs import preload
from foundryd.errors import UsageError

BASE = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))
END = BASE + 6 * STRIDE

Compile = Callable[..., Path]

# An allocator in front of the C library's, as jemalloc is: every allocation of the process, from the first on.
ALLOCATOR = """
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
unsigned long allocations;
static char early[1 << 18]; static size_t used;
static void *(*real_malloc)(size_t), *(*real_realloc)(void *, size_t), *(*real_aligned)(size_t, size_t);
static void (*real_free)(void *);
static __thread int inside;
static int is_early(void *p) { return (char *)p >= early && (char *)p < early + sizeof early; }
static void *take(size_t n) {
  size_t at = __atomic_fetch_add(&used, (n + 31) & ~(size_t)15, __ATOMIC_RELAXED);
  if (at + n + 16 > sizeof early) _exit(99);
  *(size_t *)(early + at) = n;
  return early + at + 16;
}
static int ready(void) {
  if (real_free) return 1;
  if (inside) return 0;
  inside = 1;  // the C library's own dlsym allocates when it fails, and comes back here
  real_malloc = dlsym(RTLD_NEXT, "malloc"); real_realloc = dlsym(RTLD_NEXT, "realloc");
  real_aligned = dlsym(RTLD_NEXT, "aligned_alloc"); real_free = dlsym(RTLD_NEXT, "free");
  inside = 0;
  return real_free != NULL;
}
void *malloc(size_t n) {
  if (!ready()) return take(n);
  __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
  return real_malloc(n);
}
void free(void *p) { if (p && !is_early(p) && ready()) real_free(p); }
void *calloc(size_t n, size_t size) {
  if (size && n > (size_t)-1 / size) { errno = ENOMEM; return NULL; }
  void *p = malloc(n * size);
  return p ? memset(p, 0, n * size) : p;
}
void *realloc(void *p, size_t n) {
  if (p && !is_early(p) && ready()) return real_realloc(p, n);
  void *q = malloc(n);
  if (p && q) { size_t old = ((size_t *)p)[-2]; memcpy(q, p, old < n ? old : n); }
  return q;
}
void *aligned_alloc(size_t a, size_t n) { return ready() ? real_aligned(a, n) : NULL; }
void *memalign(size_t a, size_t n) { return aligned_alloc(a, n); }
int posix_memalign(void **out, size_t a, size_t n) { *out = aligned_alloc(a, n); return *out ? 0 : ENOMEM; }
"""

# A library that takes dlsym for itself, as other hooks of the driver do.
LOOKUP = """
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
unsigned long lookups, driver_lookups;
static void *(*real)(void *, const char *);
// A jump at its end: RTLD_NEXT is told by the return address, which is to stay the caller's.
__attribute__((optimize("optimize-sibling-calls"))) void *dlsym(void *handle, const char *name) {
  if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  ++lookups;
  driver_lookups += !strncmp(name, "cu", 2);
  return real(handle, name);
}
"""

# A library that takes dl_iterate_phdr, as the thread sanitizer does, and looks for the real one when that is called.
OBJECTS = """
#include <dlfcn.h>
#include <link.h>
unsigned long iterations;
int dl_iterate_phdr(int (*look)(struct dl_phdr_info *, size_t, void *), void *data) {
  static int (*real)(int (*)(struct dl_phdr_info *, size_t, void *), void *);
  if (!real) real = dlsym(RTLD_NEXT, "dl_iterate_phdr");
  ++iterations;
  return real(look, data);
}
"""

# Opens the driver late, through a library that is opened late, and says where its memory is.
PLUGIN = """
#include "probe.h"
ptr plug(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context; ptr a;
  if (!driver) { fprintf(stderr, "%s\\n", dlerror()); exit(1); }
  CHECK(((init_fn)dlsym(driver, "cuInit"))(0));
  CHECK(((retain_fn)dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0));
  CHECK(((current_fn)dlsym(driver, "cuCtxSetCurrent"))(context));
  CHECK(((alloc_fn)dlsym(driver, "cuMemAlloc_v2"))(&a, 4096));
  return a;
}
"""

# ``how`` the child comes to be, then what it is given to run.
STARTER = """
#include "probe.h"
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
extern char **environ;
static ptr work(const char *path) {
  void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!plugin) { fprintf(stderr, "%s\\n", dlerror()); exit(1); }
  return ((ptr (*)(void))dlsym(plugin, "plug"))();
}
static unsigned long counted(const char *name) {
  unsigned long *at = dlsym(RTLD_DEFAULT, name);
  return at ? *at : 0;
}
static int say(const char *path) {
  ptr a = work(path);
  printf("%llu %lu %lu\\n", a, counted("allocations"), counted("lookups"));
  return fflush(stdout);
}
int main(int argc, char **argv) {
  const char *how = argv[1], *path = argv[2];
  char *line[] = {argv[0], "self", argv[2], NULL};
  pid_t child = 0; int status = 0;
  if (!strcmp(how, "self")) return say(path);
  if (!strcmp(how, "fork")) { child = fork(); if (!child) _exit(say(path)); }
  else if (!strcmp(how, "fork+exec")) { child = fork(); if (!child) { execv(argv[0], line); _exit(127); } }
  else if (!strcmp(how, "vfork")) { child = vfork(); if (!child) { execv(argv[0], line); _exit(127); } }
  else CHECK(posix_spawn(&child, argv[0], NULL, NULL, line, environ));
  if (child < 0 || waitpid(child, &status, 0) != child) return 1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
"""

WAYS = ("self", "fork", "fork+exec", "vfork", "posix_spawn")


@pytest.fixture(scope="module")
def allocator(compile_c: Compile) -> Path:
    return compile_c("liballocator.so", ALLOCATOR)


@pytest.fixture(scope="module")
def lookup(compile_c: Compile) -> Path:
    return compile_c("liblookup.so", LOOKUP)


@pytest.fixture(scope="module")
def starter(compile_c: Compile) -> list[str | Path]:
    """The program, and where the library is that it opens."""
    return [compile_c("starter", STARTER), compile_c("libplugin.so", PLUGIN)]


def preloaded(hooked: Any, libraries: Sequence[Path], mode: str | None = "capture") -> dict[str, str]:
    """An environment with exactly these libraries preloaded, in this order."""
    environment: dict[str, str] = hooked.environment(mode, libraries, hook=False)
    return environment


def orders(hooked: Any, *others: Path) -> list[list[Path]]:
    return [list(order) for order in itertools.permutations([hooked.hook, *others])]


@pytest.mark.parametrize("way", WAYS)
def test_the_order_does_not_matter(hooked: Any, starter: list[Path], allocator: Path, lookup: Path, way: str) -> None:
    program, plugin = starter
    for order in orders(hooked, allocator, lookup):
        env = preloaded(hooked, order)
        address, allocations, lookups = map(int, hooked.program([program, way, plugin], env=env).stdout.split())
        names = [path.name for path in order]
        assert BASE <= address < END, names
        # The others still do their work.
        assert allocations > 0, names
        if order.index(lookup) < order.index(hooked.hook):
            assert lookups > 4, names


@pytest.mark.parametrize("way", WAYS)
def test_without_a_mode_nothing_changes_for_the_others(
    hooked: Any, starter: list[Path], allocator: Path, lookup: Path, way: str
) -> None:
    program, plugin = starter
    for order in orders(hooked, allocator, lookup):
        address, allocations, _ = map(
            int, hooked.program([program, way, plugin], env=preloaded(hooked, order, None)).stdout.split()
        )
        assert not BASE <= address < END
        assert allocations > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_library_before_the_list_of_objects_may_look_for_it_late(
    hooked: Any, starter: list[Path], compile_c: Compile, way: str
) -> None:
    program, plugin = starter
    objects = compile_c("libobjects.so", OBJECTS)
    for order in orders(hooked, objects):
        stdout = hooked.program([program, way, plugin], env=preloaded(hooked, order)).stdout
        assert BASE <= int(stdout.split()[0]) < END, order


@pytest.mark.parametrize("way", WAYS)
def test_stdbuf_puts_its_library_in_and_the_hook_stays(hooked: Any, starter: list[Path], way: str) -> None:
    """It appends its library to ``LD_PRELOAD``, whatever is there."""
    stdbuf = shutil.which("stdbuf")
    if stdbuf is None:
        pytest.skip("there is no stdbuf")
    program, plugin = starter
    done = hooked.program([stdbuf, "-oL", "-eL", program, way, plugin], "capture")
    assert BASE <= int(done.stdout.split()[0]) < END
    listed = hooked.program([stdbuf, "-oL", "/bin/sh", "-c", "echo $LD_PRELOAD"], "capture").stdout
    assert str(hooked.hook) in listed
    assert "libstdbuf" in listed


@pytest.mark.parametrize("separator", [":", " ", "::", " :"])
def test_lists_may_be_written_in_every_way_that_the_loader_reads(
    hooked: Any, starter: list[Path], allocator: Path, separator: str
) -> None:
    program, plugin = starter
    for order in ([hooked.hook, allocator, hooked.hook], [allocator, hooked.hook]):
        env = hooked.environment("capture") | {"LD_PRELOAD": separator.join(map(str, order))}
        assert BASE <= int(hooked.program([program, "self", plugin], env=env).stdout.split()[0]) < END


@pytest.mark.parametrize("folder", ["a/b/c/" * 30, "v1.2+x@y,z;[1]{2}", "grün-環境", "%20#'\"", "$x", "-rpath", "~"])
def test_the_hook_may_lie_anywhere(hooked: Any, starter: list[Path], tmp_path: Path, folder: str) -> None:
    program, plugin = starter
    place = tmp_path / folder
    place.mkdir(parents=True)
    copy = shutil.copy(hooked.hook, place / "other-name.so")
    for way in WAYS:
        done = hooked.program([program, way, plugin], env=preloaded(hooked, [Path(copy)]))
        assert BASE <= int(done.stdout.split()[0]) < END


@pytest.mark.parametrize("folder", ["my env", "a:b"])
def test_a_path_that_the_loader_would_cut_is_refused(folder: str) -> None:
    with pytest.raises(UsageError, match=f"{folder}.*cannot be preloaded.* space or a colon: install"):
        preload({}, Path("/opt") / folder / "libhook.so")


def test_python_with_threads_and_children_works_beside_an_allocator_and_another_lookup(
    hooked: Any, allocator: Path, lookup: Path
) -> None:
    source = """
        import os, subprocess, sys, threading, fdyhook, soft
        code = "import soft; soft.start(); print(soft.malloc(4096))"
        out = []
        def child():
            done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=50)
            out.append(done.stdout.strip() or done.stderr)
        threads = [threading.Thread(target=child) for _ in range(3)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        read, write = os.pipe()
        if os.fork() == 0:
            soft.start()
            os.write(write, str(soft.malloc(4096)).encode())
            os._exit(0)
        os.close(write)
        soft.start()
        fdyhook.answer([*out, os.fdopen(read).read(), soft.malloc(4096)])
    """
    for order in orders(hooked, allocator, lookup):
        assert {int(a) for a in hooked.python(source, env=preloaded(hooked, order))} == {BASE}


def find_jemalloc() -> str | None:
    folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
    found = [path for folder in folders for path in sorted(Path(folder).glob("libjemalloc.so*"))]
    return str(found[0]) if found else None


@pytest.mark.skipif(find_jemalloc() is None, reason="jemalloc is not installed")
@pytest.mark.parametrize("way", WAYS)
def test_jemalloc_may_come_before_or_behind(hooked: Any, starter: list[Path], lookup: Path, way: str) -> None:
    program, plugin = starter
    for order in orders(hooked, Path(str(find_jemalloc())), lookup):
        stdout = hooked.program([program, way, plugin], env=preloaded(hooked, order)).stdout
        assert BASE <= int(stdout.split()[0]) < END, order
