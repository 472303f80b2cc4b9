# SPDX-License-Identifier: Apache-2.0
"""Collectives issued again on the real library, and spliced into graphs: real sums between real processes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundryd import _native
from foundryd._native import _hook

CAPTURE = """
from ncclkit import MAX, Nccl
start()
nccl, module = Nccl(), Module()
hook.arena_push(_hook.Arena.IO)
memory = malloc(1 << 16)
hook.arena_pop()
mad, join = module.function("mad"), module.function("join")
def at(i):
    return memory + 1024 * i
world = nccl.init(2, 0)
other = nccl.init(2, 0)

def body(s):
    launch(mad, s, u64(at(1), 3, 1))
    world.all_reduce(at(1), at(2), 1, s)
    launch(mad, s, u64(at(2), 2, 5))
    with nccl.group():
        world.all_reduce(at(2), at(3), 1, s, MAX)
        world.all_gather(at(2), at(4), 1, s)
    side = stream()
    with forked(s, side):
        other.all_reduce(at(5), at(6), 1, side)
        world.all_to_all(at(4), at(7), 1, s)
    launch(join, s, u64(at(6), at(7), at(8)))
    world.every_kind(at(9), at(20), 1, 0, s)

read = hook.read_graph(int(capture(body)))
report = hook.report()
answer({"graph": plain(read), "record": recorded(hook), "base": report.arena_base, "stride": report.arena_stride,
        "allocations": hook.allocations().tolist(), "memory": memory,
        "ops": base64.b64encode(hook.comm_ops().tobytes()).decode()})
"""

# One rank of two.
RESTORE = """
import sys, time
from ncclkit import MAX, Nccl
captured = given()
rank, unique = captured["rank"], [bytes.fromhex(u) for u in captured["unique"]]
hook.set_layout(captured["base"], captured["stride"],
                np.array([tuple(a) for a in captured["allocations"]], _hook.allocation_dtype))
start()
nccl = Nccl()
hook.arena_push(_hook.Arena.IO)
memory = malloc(1 << 16)
hook.arena_pop()
hook.map_held()
assert memory == captured["memory"]
def at(i):
    return memory + 1024 * i
world = nccl.init(2, rank, unique[0])
other = nccl.init(2, rank, unique[1])
functions = load(hook, captured["record"])
ops = np.frombuffer(base64.b64decode(captured["ops"]), _hook.comm_op_dtype).copy()
ops["peer"][np.isin(ops["kind"], (8, 9))] = 1 - rank  # what a rank's plan patches
before = hook.report()
small = [hook.comm_reissue(ops[ops["group"] == g]) for g in range(int(ops["group"].max()) + 1)]
issued = hook.report()
built = hook.build_graph(arrays(captured["graph"]), np.array(functions, np.uint64), small)

orders, living = set(), []
for i in range(40):
    graph, nodes = hook.build_graph_and_nodes(arrays(captured["graph"]), np.array(functions, np.uint64), small)
    place = {int(node): number for number, node in enumerate(nodes)}
    waited = [ok(cu.cuGraphNodeGetDependencies(cu.CUgraphNode(int(node)), 64)) for node in nodes]
    orders.add(str([[place.get(int(node), -1) for node in found[: int(count)]] for found, *_, count in waited]))
    # Memory for the next graph's nodes is free at other places each time.
    living.append(graph)
    if i % 3:
        hook.destroy_graph(living.pop(i * 7 % len(living)))
for graph in living:
    hook.destroy_graph(graph)

write_words(memory, [0] * 8192)
write_words(at(1), [10 + rank])
write_words(at(5), [100 * (rank + 1)])
write_words(at(9), [3 + rank, 4 + rank])
executable = ok(cu.cuGraphInstantiate(cu.CUgraph(built), 0))
on = stream()
rounds = []
for i in range(20):
    ok(cu.cuGraphLaunch(executable, on))
    world.all_reduce(at(30), at(31), 1, on)  # eager, in between
ok(cu.cuStreamSynchronize(on))
out = [words(at(i), 2) for i in (1, 2, 3, 4, 5, 6, 7, 8)] + [words(at(20), 2)]
nodes, count = ok(cu.cuGraphGetNodes(cu.CUgraph(built), 200))
types = [ok(cu.cuGraphNodeGetType(node)).name for node in nodes[:count]]
in_use = refusal(lambda: hook.destroy_graph(small[0]))
ok(cu.cuGraphExecDestroy(executable))
hook.destroy_graph(built)
for graph in small:
    hook.destroy_graph(graph)
owners = [[int(m["communication"]), int(m["live"])] for m in hook.modules()]
world.destroy()
other.destroy()
answer({"words": out, "types": sorted(types), "in_use": in_use, "owners": owners, "orders": sorted(orders),
        "captures": [issued.engine["captures"] - before.engine["captures"],
                     issued.communication["captures"] - before.communication["captures"]],
        "gone": refusal(lambda: hook.comm_reissue(ops[:1]))})
"""


def run_pair(hooked: Any, source: str, captured: dict[str, Any], tmp_path: Path, **env: str) -> list[Any]:
    """Runs one child for each rank of two at the same time; their answers."""
    unique = hooked.graphs(
        "from ncclkit import Nccl\nanswer([Nccl().unique_id().hex() for _ in range(2)])", mode="", env=env
    )
    children = []
    for rank in range(2):
        given = tmp_path / f"given.{rank}"
        given.write_text(json.dumps({**captured, "rank": rank, "unique": unique}))
        children.append(
            subprocess.Popen(
                [sys.executable, "-P", "-c", source],
                env=hooked.environment("restore") | env,
                stdin=given.open(),
                stdout=(tmp_path / f"out.{rank}").open("w"),
                stderr=(tmp_path / f"err.{rank}").open("w"),
            )
        )
    end = time.monotonic() + 90
    try:
        for child in children:
            child.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for child in children:
            child.kill()
            child.wait()
    errors = "\n".join((tmp_path / f"err.{rank}").read_text() for rank in range(2))
    assert [child.returncode for child in children] == [0, 0], errors
    return [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2)]


def source_of(body: str, prelude: str) -> str:
    return textwrap.dedent(prelude) + textwrap.dedent(body)


def expected_after(rounds: int) -> list[list[list[int]]]:
    """What the captured program computes on two ranks."""
    one = [10, 11]
    five = [100, 200]
    for _ in range(rounds):
        one = [3 * v + 1 for v in one]
        two = [2 * sum(one) + 5] * 2
        three = [max(two)] * 2
        four = [two, two]
        six = [sum(five)] * 2
        seven = [[four[p][r] for p in range(2)] for r in range(2)]
        eight = [31 * six[r] + seven[r][0] for r in range(2)]
    return [
        [
            [one[r], 0],
            [two[r], 0],
            [three[r], 0],
            four[r],
            [five[r], 0],
            [six[r], 0],
            seven[r],
            [eight[r], 0],
        ]
        for r in range(2)
    ]


@pytest.mark.parametrize(("mixing", "splice"), [("1", "inline"), ("0", "inline"), ("1", "child")])
def test_reissued_collectives_compute_between_processes(
    hooked: Any, graph_prelude: str, tmp_path: Path, mixing: str, splice: str
) -> None:
    captured = hooked.graphs(CAPTURE, preload=[_native.fake_nccl()])
    env = {"NCCL_GRAPH_MIXING_SUPPORT": mixing, "FOUNDRYD_SPLICE": splice}
    ranks = run_pair(hooked, source_of(RESTORE, graph_prelude), captured, tmp_path, **env)
    expected = expected_after(20)
    for rank, found in enumerate(ranks):
        assert found["words"][:8] == expected[rank]
        # The last call of every_kind exchanges word 0 of slot 9 with the peer.
        assert found["words"][8][0] == 3 + (1 - rank)
        assert found["in_use"][0] == "UsageError"
        assert "built graphs use" in found["in_use"][1]
        assert found["gone"][0] == "UsageError"
        assert "destroyed" in found["gone"][1]
        # Nodes lie elsewhere in each of these graphs, and their edges come in one order.
        assert len(found["orders"]) == 1
        # Issuing again is on behalf of communication, and so is the module that the library loads.
        assert found["captures"] == [0, 13]
        assert [1, 1] in found["owners"]
        assert [0, 1] in found["owners"]
        if splice == "child":
            assert found["types"].count("CU_GRAPH_NODE_TYPE_GRAPH") == 13
            assert len(found["types"]) == 3 + 13
            continue
        kernels = found["types"].count("CU_GRAPH_NODE_TYPE_KERNEL")
        waits = found["types"].count("CU_GRAPH_NODE_TYPE_WAIT_EVENT")
        assert kernels == 3 + 13
        assert waits == (13 if mixing == "1" else 0)
        assert len(found["types"]) == 3 + 13 * (3 if mixing == "1" else 1)


def test_the_ops_of_a_group_are_those_that_were_captured(hooked: Any) -> None:
    captured = hooked.graphs(CAPTURE, preload=[_native.fake_nccl()])
    ops = np.frombuffer(base64.b64decode(captured["ops"]), _hook.comm_op_dtype)
    assert len(np.unique(ops["group"])) == 13
    assert ops["communicator"].tolist().count(1) == 1
    nodes = np.frombuffer(base64.b64decode(captured["graph"]["nodes"]), _hook.node_dtype)
    assert sorted(nodes["comm_group"][nodes["type"] == 5].tolist()) == list(range(13))


def test_a_damaged_op_list_is_refused_before_the_library_sees_it(hooked: Any) -> None:
    cases = {
        "at least one": "ops = ops[:0]",
        "kind 10": "ops['kind'] = 10",
        "slot 9": "ops['communicator'] = 9",
        "one group at a time": "ops = np.concatenate([ops, ops]); ops['group'][1] = 5",
        "reduction 77": "ops['reduction'] = 77",
    }
    found = hooked.graphs(
        """
        from ncclkit import Nccl
        start()
        nccl = Nccl()
        comm = nccl.init(2, 0)
        out = []
        for case in given():
            ops = np.zeros(1, _hook.comm_op_dtype)
            ops["count"] = ops["datatype"] = 5
            ops["peer"] = _hook.NONE
            space = {"ops": ops, "np": np}
            exec(case, space)
            out.append(refusal(lambda: hook.comm_reissue(space["ops"])))
        answer(out)
        """,
        "restore",
        given=list(cases.values()),
        preload=[_native.fake_nccl()],
    )
    for needle, (error, text) in zip(cases, found, strict=True):
        assert error == "UsageError", text
        assert needle in text


def test_a_failing_library_is_named_and_leaves_no_capture_behind(hooked: Any) -> None:
    found = hooked.graphs(
        """
        from ncclkit import Nccl
        start()
        nccl, module, memory = Nccl(), Module(), malloc(4096)
        comm = nccl.init(2, 0)
        ops = np.zeros(2, _hook.comm_op_dtype)
        ops["count"], ops["datatype"], ops["send"], ops["recv"] = 1, 5, memory, memory
        ops["datatype"][1] = 99
        first = refusal(lambda: hook.comm_reissue(ops))
        second = refusal(lambda: hook.comm_reissue(ops[1:]))
        ops["datatype"] = 5
        small = hook.comm_reissue(ops)
        hook.destroy_graph(small)
        graph = capture(lambda s: launch(module.function("mad"), s, u64(memory, 1, 1)))
        replay(graph)
        answer([first, second])
        """,
        "restore",
        preload=[_native.fake_nccl()],
    )
    for error, text in found:
        assert error == "DriverCallFailed"
        assert "ncclAllReduce" in text or "ncclGroupEnd" in text


def collectives(count: int) -> str:
    """Code that has a graph of so many nodes in ``graph``, each the collective that was issued again in ``small``."""
    return f"""
        from ncclkit import Nccl
        start()
        nccl, memory = Nccl(), malloc(4096)
        comm = nccl.init(2, 0)
        ops = np.zeros(1, _hook.comm_op_dtype)
        ops["count"], ops["datatype"], ops["send"], ops["recv"] = 4, 5, memory, memory + 512
        small = hook.comm_reissue(ops)
        nodes = np.zeros({count}, _hook.node_dtype)
        nodes["type"], nodes["comm_group"] = 5, 0
        graph = _hook.GraphArrays(nodes, np.zeros(0, _hook.edge_dtype), np.zeros(0, _hook.attribute_dtype),
                                  np.zeros(0, np.uint8))
"""


def test_a_graph_of_anything_else_goes_in_as_a_child(hooked: Any) -> None:
    """The stub's placeholder is a child graph, not wait, kernel and record."""
    found = hooked.graphs(
        collectives(2)
        + """
        built = hook.build_graph(graph, np.zeros(0, np.uint64), [small])
        read = hook.read_graph(built)
        write_words(memory, [1, 2, 3, 4])
        replay(built)
        answer([read.nodes["type"].tolist(), read.edges[["from", "to"]].tolist(), words(memory + 512, 4)])
        """,
        "restore",
        preload=[_native.fake_nccl()],
    )
    # One after the other although nothing in the graph says so: at most one of a communicator at a time.
    assert found == [[4, 4], [[0, 1]], [1, 2, 3, 4]]


def test_another_way_of_splicing_is_refused_by_name(hooked: Any) -> None:
    found = hooked.graphs(
        collectives(1)
        + """
        answer(refusal(lambda: hook.build_graph(graph, np.zeros(0, np.uint64), [small])))
        """,
        "restore",
        preload=[_native.fake_nccl()],
        env={"FOUNDRYD_SPLICE": "sideways"},
    )
    assert "FOUNDRYD_SPLICE is 'sideways'" in found[1]
