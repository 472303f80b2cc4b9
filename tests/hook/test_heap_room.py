# SPDX-License-Identifier: Apache-2.0
"""Room in a heap: what is taken there faults in large pages, and costs nothing while nobody takes it."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.skipif(
    "SANITIZER_PRELOAD" in os.environ, reason="a sanitizer's heap is no heap that could be given room"
)

# Twenty times 16 MiB in pieces of 2,000 bytes, as a driver takes and keeps them.
PRELUDE = """
    import ctypes, os, resource, threading
    from fdyhook import answer, given
    from foundryd._native._hook import HeapRoom

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

    def faults():
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    def kibibytes(name):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(name + ":"))

    def mappings():
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)

    def take(bytes, value):
        taken = []
        for _ in range(bytes // 2000):
            taken.append(libc.malloc(2000))
            libc.memset(taken[-1], value, 2000)
        return taken

    def whole(taken, value):
        return all(ctypes.string_at(piece, 2000) == bytes([value]) * 2000 for piece in taken)

    def in_a_thread(work):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
"""

TAKES = (
    PRELUDE
    + """
    found, asked = {"faults": []}, given()

    def work():
        room, kept = HeapRoom(), []
        for number in range(20):
            before = faults()
            if asked["room"]:
                room.make(asked["room"])
            kept.append(take(16 << 20, number))
            found["faults"].append(faults() - before)
        del room
        found["whole"] = all(whole(taken, number) for number, taken in enumerate(kept))

    (in_a_thread if asked["thread"] else lambda work: work())(work)
    answer(found)
"""
)

IDLE = (
    PRELUDE
    + """
    found = {}

    def work():
        room = HeapRoom()
        resident = kibibytes("VmRSS")
        room.make(24 << 20)
        found["resident"] = kibibytes("VmRSS") - resident
        size, maps = kibibytes("VmSize"), mappings()
        for _ in range(1000):
            room.make(24 << 20)
        found["size"], found["mappings"] = kibibytes("VmSize") - size, mappings() - maps

    in_a_thread(work)
    answer(found)
"""
)

SCARCE = (
    PRELUDE
    + """
    room = HeapRoom()
    for more in (8, 40, 80):
        limit = (kibibytes("VmSize") << 10) + (more << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        room.make(100 << 20)
        room = HeapRoom()
        room.make(1)
    answer(whole(take(1 << 20, 7), 7))
"""
)


@pytest.mark.usefixtures("large_pages")
@pytest.mark.parametrize("thread", [True, False], ids=["a thread's heap", "the main thread's"])
@pytest.mark.parametrize("room", [1, 40 << 20], ids=["less than a block", "more than a block"])
def test_what_is_taken_faults_in_large_pages(hooked, thread, room):
    """Sixteen MiB are 4,096 small pages."""
    found, bare = (hooked.python(TAKES, given={"thread": thread, "room": room}) for room in (room, 0))
    assert found["whole"]
    assert bare["whole"]
    assert min(bare["faults"]) > 4000
    assert sum(found["faults"]) < sum(bare["faults"]) / 5


@pytest.mark.parametrize("env", [{}, {"MALLOC_MMAP_THRESHOLD_": "65536"}], ids=["in the heap", "mapped for itself"])
def test_room_that_nobody_takes_is_made_once_and_is_not_resident(hooked, env):
    found = hooked.python(IDLE, env=env)
    assert found["resident"] < 1024
    assert abs(found["size"]) < 1024
    assert abs(found["mappings"]) < 8


def test_where_there_is_no_memory_for_room_none_is_made(hooked):
    """Eight, forty and eighty MiB more than it has: too few for a block, for two, and for all that is asked."""
    assert hooked.python(SCARCE)
