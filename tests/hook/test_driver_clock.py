# SPDX-License-Identifier: Apache-2.0
"""The time that a thread spends in the driver is told apart from all other, for who switched that on."""

from __future__ import annotations

import pytest

# Calls that the hook passes on, calls that it makes for its arenas, and time that is nobody's.
WORK = """
    import threading, time, fdyhook, soft
    context = soft.start()

    def work(times):
        began = time.monotonic_ns()
        for _ in range(times):
            with fdyhook.arena(fdyhook.DEFAULT):
                soft.malloc(1 << 20)
            time.sleep(0.002)
        return time.monotonic_ns() - began

    def spent():
        report = fdyhook.report()
        return report.driver_ns, report.driver_calls
"""


@pytest.mark.parametrize("mode", [None, "capture", "restore"])
def test_nothing_is_timed_unless_somebody_asks(hooked, mode):
    assert hooked.python(WORK + "    work(3)\n    fdyhook.answer(spent())", mode) == [0, 0]


@pytest.mark.parametrize("mode", ["capture", "restore"])
def test_driver_and_other_time_add_up_to_the_wall_s(hooked, mode):
    wall, (ns, calls), after, later = hooked.python(
        WORK
        + """
    fdyhook._hook.time_driver(1)
    wall = work(20)
    found = spent()
    time.sleep(0.01)
    after = spent()
    fdyhook._hook.time_driver(0)
    work(2)
    fdyhook.answer([wall, found, after, spent()])
    """,
        mode,
    )
    assert calls >= 20
    assert calls < ns <= wall - 20 * 2_000_000  # what slept was no driver call
    assert after == later == [ns, calls]


def test_each_thread_has_its_own_time(hooked):
    first, other = hooked.python(
        WORK
        + """
    fdyhook._hook.time_driver(1)
    seen = []

    def run():
        soft.ok(soft.cu.cuCtxSetCurrent(context))
        before = spent()
        work(5)
        seen.extend((before, spent()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    fdyhook.answer([spent(), seen])
    """,
        "capture",
    )
    assert first == other[0] == [0, 0]
    assert other[1][1] >= 5
    assert other[1][0] > 0


def test_calls_that_pass_the_hook_by_count_from_entering_to_leaving(hooked):
    inside, counted, alone, error = hooked.python(
        WORK
        + """
    hook = fdyhook._hook
    hook.time_driver(1)
    fdyhook._check(hook.driver_enter())
    wall = work(3)
    inside = spent()
    fdyhook._check(hook.driver_leave())
    counted = spent()
    status = hook.driver_leave()
    fdyhook.answer([inside, [counted[0] >= wall, counted[1]], fdyhook.STATUS[status], fdyhook.last_error()])
    """,
        "capture",
    )
    assert inside == [0, 0]
    assert counted == [True, 1]
    assert alone == "state"
    assert error == "this thread leaves a driver call that it did not enter: call driver_enter first"
