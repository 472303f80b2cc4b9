# SPDX-License-Identifier: Apache-2.0
"""Events have numbers without holes; who misses one reads the state again."""

import threading

import pytest
import zmq

from foundryd.daemon import messages
from foundryd.daemon.client import Watcher
from foundryd.daemon.messages import Event, Status, Tick


def test_numbers_have_no_holes_and_continue_from_the_state(start, archive, control, join):
    start(archive)
    watcher = Watcher(control())
    for rank in range(3):
        join(rank).close()
    kinds, numbers = [], []
    while len(kinds) < 6:
        event = watcher.next(20)
        assert isinstance(event, Event)
        kinds.append((event.kind, event.lease.rank))
        numbers.append(event.number)
    assert sorted(kinds) == sorted([(k, r) for r in range(3) for k in ("lease_taken", "lease_ended")])
    assert numbers == list(range(watcher.state.event + 1, watcher.state.event + 7))
    assert watcher.rereads == 0


def test_loading_is_told(start, archive, control, folder, tiny):
    start(archive)
    watcher = Watcher(control())
    client = control()
    client.load(tiny.write(folder / "other.foundry"))
    client.unload("other")
    events = [watcher.next(20) for _ in range(3)]
    assert [(e.kind, e.archive.name) for e in events] == [
        ("archive_loading", "other"),
        ("archive_loaded", "other"),
        ("archive_unloaded", "other"),
    ]
    client.stop()
    assert watcher.next(20).kind == "stopping"


def test_nothing_happens_is_told_apart_from_something_lost(start, archive, control):
    start(archive)
    watcher = Watcher(control())
    assert watcher.next(2.5) is None  # ticks came and had nothing new
    assert watcher.rereads == 0


def test_two_watchers_see_the_same(start, archive, control, join):
    start(archive)
    one, two = Watcher(control()), Watcher(control())
    join(0)
    assert one.next(20) == two.next(20)


def test_a_watcher_that_is_gone_is_forgotten(start, archive, control, join):
    started = start(archive)
    for _ in range(300):  # more than may watch at a time
        client = control()
        client.subscribe()
        client.close()
    assert started.process.poll() is None
    assert Watcher(control()).state.ready


class Scripted:
    """A ROUTER that plays the daemon: state numbers and pushes as the test says."""

    def __init__(self, context, path):
        self.router = context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.rcvtimeo = 20000
        self.router.bind(f"ipc://{path}")

    def answer_subscribe(self, instance, event):
        peer, data = self.router.recv_multipart()
        request = messages.decode_request(data)
        status = Status(request.id, instance, event, 1, "x", 1, True, 0.0, 0.0, [], [])
        self.router.send_multipart([peer, messages.encode(status)])
        self.peer = peer

    def push(self, *pushed):
        for message in pushed:
            self.router.send_multipart([self.peer, messages.encode(message)])


@pytest.fixture
def scripted(context, folder, start, archive, monkeypatch):
    """A control client of a real daemon whose socket is led to a scripted one."""
    from foundryd.daemon.client import ControlClient
    from foundryd.daemon.runtime import RuntimeDir

    start(archive, directory=folder / "run")
    server = Scripted(context, folder / "scripted")
    client = ControlClient(folder / "run", 20)
    client._socket.disconnect(f"ipc://{RuntimeDir(folder / 'run').control}")
    client._socket.connect(f"ipc://{folder / 'scripted'}")
    yield server, client
    client.close()
    server.router.close()


def subscribe(server, make, instance, event):
    """Runs the client's side while the scripted daemon answers."""
    out = []
    thread = threading.Thread(target=lambda: out.append(make()))
    thread.start()
    server.answer_subscribe(instance, event)
    thread.join(20)
    return out[0]


@pytest.mark.parametrize(
    "missed",
    [
        [Event("a", 6, "ready"), Event("a", 8, "ready")],  # 7 is missing
        [Event("a", 6, "ready"), Tick("a", 7)],  # the last one is missing
        [Event("a", 6, "ready"), Event("b", 7, "ready")],  # another daemon
        [Event("a", 6, "ready"), Tick("b", 1)],
    ],
)
def test_after_a_gap_the_state_is_read_again(scripted, missed):
    server, client = scripted
    watcher = subscribe(server, lambda: Watcher(client), "a", 5)
    server.push(Event("a", 5, "ready"), *missed)  # 5 is in the state already
    assert watcher.next(20).number == 6
    again = subscribe(server, lambda: watcher.next(20), "c", 20)
    assert isinstance(again, Status)
    assert again.event == 20
    assert watcher.rereads == 1
    server.push(Event("c", 20, "ready"), Event("c", 21, "ready"))
    assert watcher.next(20).number == 21
    assert watcher.rereads == 1
