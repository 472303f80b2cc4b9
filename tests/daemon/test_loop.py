# SPDX-License-Identifier: Apache-2.0
"""Timers of the event loop run in order, each once, and cancelled ones take no room."""

import gc
import weakref

from foundryd.daemon.loop import Loop


def test_timers_run_in_the_order_of_their_deadlines_whatever_was_cancelled_between() -> None:
    loop, ran, timers = Loop(), [], []
    for number in range(1000):
        timers.append(loop.later((number * 7919 % 1000) * 1e-4, lambda number=number: ran.append(number)))
        for _ in range(3):
            loop.later(0.0, lambda: ran.append(-1)).cancel()
    loop.later(0.2, loop.stop)
    loop.run()
    loop.close()
    assert ran == sorted(range(1000), key=lambda number: timers[number])


def test_cancelled_timers_do_not_pile_up_until_they_are_due() -> None:
    loop = Loop()
    kept = loop.later(1000, lambda: None)
    timers: list[weakref.ref] = []
    for _ in range(5000):
        timer = loop.later(1000, lambda: None)
        timer.cancel()
        timers.append(weakref.ref(timer))
    del timer
    gc.collect()
    assert sum(timer() is not None for timer in timers) <= 64
    assert kept.callback is not None
    loop.close()
