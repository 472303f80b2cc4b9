# SPDX-License-Identifier: Apache-2.0
"""A graph captured alone, with stand-ins for its peers, works on the peers' memory when it is built again."""

from __future__ import annotations

import os
import struct
from typing import Any

IO, GRAPH = 3, 4
BASE = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))
GRAPH_BASE = BASE + GRAPH * STRIDE

# Rank 1: out = own * 31 + peer's, and a copy of the peer's; out of its own window it reads its own memory.
CAPTURE = """
    from ipcpeer import get, open_handle
    start()
    def make(arena):
        hook.arena_push(arena)
        made = malloc(4096)
        hook.arena_pop()
        return made
    own, held = make(_hook.Arena.IO), make(_hook.Arena.GRAPH)
    peers = [open_handle(hook.ipc_peer_handle(bytes.fromhex(get(a)), 0).hex()) for a in (own, held)]
    alias = open_handle(get(own))
    module = Module()
    def body(s):
        launch(module.function("join"), s, u64(own, peers[0], own + 8))
        launch(module.function("join"), s, u64(alias, peers[1], own + 16))
        ok(cu.cuMemcpyDtoDAsync(own + 24, peers[1] + 8, 8, s))
    graph = capture(body)
    read = plain(hook.read_graph(int(graph)))
    write_words(own, [5, 0, 0, 0])
    replay(graph)
    answer({"graph": read, "record": recorded(hook), "allocations": hook.allocations().tolist(), "seen": words(own, 4),
            "windows": hook.windows().tolist()})
"""

RESTORE = """
    from ipcpeer import get, open_handle
    captured, base, stride, handles = given()
    hook.set_layout(base, stride, np.array([tuple(a) for a in captured["allocations"]], _hook.allocation_dtype))
    start()
    hook.arena_push(_hook.Arena.IO)
    own = malloc(4096)
    hook.arena_pop()
    hook.map_held()
    for handle in [*handles, get(own)]:
        open_handle(handle)
    functions = load(hook, captured["record"])
    built = hook.build_graph(arrays(captured["graph"]), np.array(functions, np.uint64))
    write_words(own, [5, 0, 0, 0])
    replay(built)
    answer([words(own, 4), hook.windows().tolist()])
"""


def test_a_graph_reads_the_real_peer_where_its_stand_in_was(hooked: Any, run_rank: Any) -> None:
    captured = hooked.graphs(CAPTURE, "capture", env={"RANK": "1"})
    assert captured["seen"] == [5, 5 * 31, 5 * 31, 0]
    assert [w[3] for w in captured["windows"]] == [0, 0, 1]
    with run_rank(0, "restore") as peer:
        peer.set_layout(BASE, STRIDE, [[a[2], a[3], a[0], a[1], a[4]] for a in captured["allocations"]])
        peer.start()
        own = peer.malloc(4096, IO)
        peer.map_held()  # its other allocation: no engine made it, and peers see it all the same
        peer.write(own, struct.pack("<Q", 1000).hex())
        peer.write(GRAPH_BASE, struct.pack("<QQ", 2000, 3000).hex())
        handles = [peer.get(own), peer.get(GRAPH_BASE)]
        given = [captured, BASE, STRIDE, handles]
        seen, windows = hooked.graphs(RESTORE, "restore", env={"RANK": "1"}, given=given)
    assert seen == [5, 5 * 31 + 1000, 5 * 31 + 2000, 3000]
    assert windows == captured["windows"]
