# SPDX-License-Identifier: Apache-2.0
"""However a program asks for a driver function, it gets the hook's; and nothing else changes for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BASE = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))
END = BASE + 6 * STRIDE

Compile = Callable[..., Path]

PROLOGUE = '#include "probe.h"\n'

LINKED = (
    PROLOGUE
    + """
int cuInit(unsigned); int cuDevicePrimaryCtxRetain(void **, int); int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(ptr *, size_t);
int main(void) {
  void *context; ptr a;
  CHECK(cuInit(0)); CHECK(cuDevicePrimaryCtxRetain(&context, 0)); CHECK(cuCtxSetCurrent(context));
  CHECK(cuMemAlloc_v2(&a, 4096));
  printf("%llu\\n", a);
}
"""
)

OPENED = (
    PROLOGUE
    + """
int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context; ptr a;
  if (!driver) { fprintf(stderr, "%s\\n", dlerror()); return 1; }
  CHECK(((init_fn)dlsym(driver, "cuInit"))(0));
  CHECK(((retain_fn)dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0));
  CHECK(((current_fn)dlsym(driver, "cuCtxSetCurrent"))(context));
  CHECK(((alloc_fn)dlsym(driver, "cuMemAlloc_v2"))(&a, 4096));
  printf("%llu\\n", a);
}
"""
)

# As the CUDA runtime does it, shared or static.
THROUGH_PROC_ADDRESS = (
    PROLOGUE
    + """
static address_fn get;
static void *find(const char *name, int version) {
  void *out = NULL; int status = -1;
  CHECK(get(name, &out, version, 0, &status));
  if (!out || status) { fprintf(stderr, "%s: status %d\\n", name, status); exit(1); }
  return out;
}
int main(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY), *context; ptr a;
  get = (address_fn)dlsym(driver, "cuGetProcAddress_v2");
  CHECK(((init_fn)find("cuInit", 2000))(0));
  CHECK(((retain_fn)find("cuDevicePrimaryCtxRetain", 7000))(&context, 0));
  CHECK(((current_fn)find("cuCtxSetCurrent", 4000))(context));
  CHECK(((alloc_fn)find("cuMemAlloc", 3020))(&a, 4096));
  printf("%llu\\n", a);
}
"""
)


@pytest.fixture(scope="module")
def linked(compile_c: Compile) -> Path:
    return compile_c("linked", LINKED, cuda=True)


@pytest.mark.parametrize("mode", ["capture", "restore", None])
def test_a_linked_program_allocates_in_the_arena_if_a_mode_is_set(hooked: Any, linked: Path, mode: str | None) -> None:
    address = int(hooked.program([linked], mode).stdout)
    assert (BASE <= address < END) == (mode is not None)


@pytest.mark.parametrize("source", [OPENED, THROUGH_PROC_ADDRESS], ids=["dlsym", "proc_address"])
@pytest.mark.parametrize("mode", ["capture", None])
def test_a_program_that_opens_the_driver_is_seen(
    hooked: Any, compile_c: Compile, source: str, mode: str | None
) -> None:
    address = int(hooked.program([compile_c("opener", source)], mode).stdout)
    assert (BASE <= address < END) == (mode is not None)


def test_ctypes_and_cuda_bindings_are_seen(hooked: Any) -> None:
    addresses = hooked.python(
        """
        import ctypes, fdyhook, soft
        soft.start()
        p = ctypes.c_uint64()
        assert ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(4096)) == 0
        fdyhook.answer([p.value, soft.malloc(4096)])
        """,
        "capture",
    )
    assert all(BASE <= a < END for a in addresses)


def test_a_library_opened_later_is_seen(hooked: Any, compile_c: Compile) -> None:
    plugin = compile_c(
        "libplugin.so",
        PROLOGUE
        + "int cuMemAlloc_v2(ptr *, size_t); ptr plug(void) { ptr a; CHECK(cuMemAlloc_v2(&a, 64)); return a; }",
        cuda=True,
    )
    address = hooked.python(
        f"""
        import ctypes, fdyhook, soft
        soft.start()
        plugin = ctypes.CDLL({str(plugin)!r}, mode=ctypes.RTLD_LOCAL)
        plugin.plug.restype = ctypes.c_uint64
        fdyhook.answer(plugin.plug())
        """,
        "capture",
    )
    assert BASE <= address < END


PROC_ADDRESSES = """
import ctypes, fdyhook
driver = ctypes.CDLL("libcuda.so.1")
asks = fdyhook.given()

class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_long)]

def where(address):
    info = Info()
    if not address or not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info)):
        return None
    return [info.file.decode().rsplit("/", 1)[1], info.name.decode()]

out = []
for name, version, flags in asks:
    pointer, status = ctypes.c_void_p(), ctypes.c_int(-1)
    old, name, flags = ctypes.c_void_p(), name.encode(), ctypes.c_uint64(flags)
    result = driver.cuGetProcAddress_v2(name, ctypes.byref(pointer), version, flags, ctypes.byref(status))
    old_result = driver.cuGetProcAddress(name, ctypes.byref(old), version, flags)
    out.append([result, status.value, where(pointer.value), old_result, where(old.value)])
fdyhook.answer(out)
"""

HOOK = "libfoundryd_hook.so"


def test_versions_and_stream_flags_choose_the_override(hooked: Any) -> None:
    expected = {
        ("cuMemAlloc", 3020, 0): "cuMemAlloc_v2",
        ("cuMemAlloc", 13000, 0): "cuMemAlloc_v2",
        ("cuMemAllocAsync", 11020, 0): "cuMemAllocAsync",
        ("cuMemAllocAsync", 11020, 1): "cuMemAllocAsync",
        ("cuMemAllocAsync", 12040, 2): "cuMemAllocAsync_ptsz",
        ("cuMemFree", 12000, 2): "cuMemFree_v2",
        ("cuCtxCreate", 3020, 0): "cuCtxCreate_v2",
        ("cuCtxCreate", 11040, 0): "cuCtxCreate_v3",
        ("cuCtxCreate", 12040, 0): "cuCtxCreate_v3",
        ("cuCtxCreate", 12050, 0): "cuCtxCreate_v4",
        ("cuGetProcAddress", 11030, 0): "cuGetProcAddress",
        ("cuGetProcAddress", 12000, 0): "cuGetProcAddress_v2",
    }
    asks = [list(k) for k in expected]
    seen = hooked.python(PROC_ADDRESSES, "capture", given=asks)
    assert [row[:3] for row in seen] == [[0, 0, [HOOK, name]] for name in expected.values()]
    assert [row[3:] for row in seen] == [[0, [HOOK, name]] for name in expected.values()]


def test_what_the_hook_does_not_know_is_answered_by_the_driver_alone(hooked: Any) -> None:
    asks = [
        ["cuInit", 2000, 0],
        ["cuStreamSynchronize", 12000, 2],
        ["cuNoSuchFunction", 12000, 0],
        ["cuMemAllocAsync", 10000, 0],  # older than the function
        ["", 12000, 0],
    ]
    with_hook = hooked.python(PROC_ADDRESSES, "capture", given=asks)
    # The child's helper needs the hook in the process; unset, it must change nothing.
    assert with_hook == hooked.python(PROC_ADDRESSES, None, given=asks)
    assert with_hook[0][2] == ["libcuda.so.1", "cuInit"]
    assert with_hook[2][2] is None


def test_without_a_mode_the_program_gets_the_drivers_functions(hooked: Any) -> None:
    seen = hooked.python(PROC_ADDRESSES, None, given=[["cuMemAlloc", 12000, 0], ["cuCtxCreate", 12050, 0]])
    assert [row[2][0] for row in seen] == ["libcuda.so.1"] * 2


def _exported(library: Path) -> set[str]:
    command = ["nm", "-D", "--defined-only", library]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {line.split()[2].split("@")[0] for line in listed.stdout.splitlines()}


def test_exports_and_rows_agree(hooked: Any, compile_c: Compile) -> None:
    """Every driver function that the hook exports is also given out by dlsym, and nothing but functions is exported."""
    exported = _exported(hooked.hook)
    others = exported - {"fdy_hook_api", "dlsym", "dlvsym"}
    assert all(name.startswith(("cu", "nccl")) for name in others), others
    driver = sorted(n for n in others if n.startswith("cu"))
    assert set(driver) <= _exported(hooked.driver / "libcuda.so.1")
    program = compile_c(
        "all",
        PROLOGUE
        + """
int main(int argc, char **argv) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  for (int i = 1; i < argc; ++i) printf("%s %s\\n", argv[i], object_of(dlsym(driver, argv[i])));
}
""",
    )
    seen = hooked.program([program, *driver], "capture").stdout.splitlines()
    assert seen == [f"{name} {HOOK}" for name in driver]


def test_first_use_by_many_threads_at_once(hooked: Any, compile_c: Compile) -> None:
    program = compile_c(
        "threads",
        PROLOGUE
        + """
int cuInit(unsigned); int cuDevicePrimaryCtxRetain(void **, int); int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(ptr *, size_t);
static pthread_barrier_t gate;
static void *work(void *out) {
  void *context; ptr a;
  pthread_barrier_wait(&gate);
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(((init_fn)dlsym(driver, "cuInit"))(0));
  CHECK(cuDevicePrimaryCtxRetain(&context, 0)); CHECK(cuCtxSetCurrent(context));
  CHECK(((alloc_fn)dlsym(driver, "cuMemAlloc_v2"))(&a, 1000));
  *(ptr *)out = a;
  return NULL;
}
int main(void) {
  enum { N = 16 };
  pthread_t threads[N]; ptr out[N];
  pthread_barrier_init(&gate, NULL, N);
  for (int i = 0; i < N; ++i) pthread_create(&threads[i], NULL, work, &out[i]);
  for (int i = 0; i < N; ++i) { pthread_join(threads[i], NULL); printf("%llu\\n", out[i]); }
}
""",
        cuda=True,
    )
    addresses = sorted(int(line) for line in hooked.program([program], "capture").stdout.split())
    assert addresses == [BASE + 1024 * i for i in range(16)]


def test_a_mode_that_does_not_exist_is_said_and_switches_nothing_on(hooked: Any, linked: Path) -> None:
    done = hooked.program([linked], "captur")
    assert not BASE <= int(done.stdout) < END
    assert "captur" in done.stderr
    assert "unset it or correct it" in done.stderr


def test_spawned_children_are_hooked_too(hooked: Any, linked: Path) -> None:
    out = hooked.python(
        f"""
        import subprocess, fdyhook
        fdyhook.answer(subprocess.run([{str(linked)!r}], capture_output=True, text=True, check=True, timeout=60).stdout)
        """,
        "capture",
    )
    assert BASE <= int(out) < END


def test_without_a_driver_programs_run_as_ever(hooked: Any, compile_c: Compile, tmp_path: Path) -> None:
    program = compile_c(
        "none",
        PROLOGUE + 'int main(void) { printf("%d\\n", dlopen("libcuda.so.1", RTLD_NOW) == NULL); }',
    )
    assert hooked.program([program], "capture", env={"LD_LIBRARY_PATH": str(tmp_path)}).stdout.strip() == "1"


def test_what_a_communication_library_allocates_stays_with_the_driver(hooked: Any, compile_c: Compile) -> None:
    """Its own threads allocate too, without any call of the program's that the hook could see."""
    source = (
        PROLOGUE
        + """
int cuMemAlloc_v2(ptr *, size_t); int cuMemHostAlloc(void **, size_t, unsigned); int cuCtxSetCurrent(void *);
static ptr out[2];
static void *work(void *context) {
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuMemAlloc_v2(&out[0], 64)); CHECK(cuMemHostAlloc((void **)&out[1], 64, 0));
  return NULL;
}
ptr *allocate(void *context) {
  pthread_t thread;
  pthread_create(&thread, NULL, work, context); pthread_join(thread, NULL);
  return out;
}
"""
    )
    libraries = [str(compile_c(name, source, cuda=True)) for name in ("libncclprobe.so", "libother.so")]
    seen, counted = hooked.python(
        """
        import ctypes, fdyhook, soft
        context = soft.start()
        out = []
        for path in fdyhook.given():
            library = ctypes.CDLL(path)
            library.allocate.restype = ctypes.POINTER(ctypes.c_uint64)
            out += library.allocate(ctypes.c_void_p(int(context)))[:2]
        report = fdyhook.report()
        fdyhook.answer([out, [report.communication.allocations, report.engine.allocations]])
        """,
        "capture",
        given=libraries,
    )
    assert [BASE <= a < END for a in seen] == [False, False, True, True]
    assert counted == [2, 2]
