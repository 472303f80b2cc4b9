# SPDX-License-Identifier: Apache-2.0
"""Graphs built from arrays: the captured graph again, in another process; damaged arrays are refused."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from foundryd._native import _hook

CELLS = 16  # of 8 bytes; graphs work on these

# Runs a list of programs under capture; answers what another process needs to do the same without capturing.
CAPTURE = """
    programs = given()
    start()
    modules = [Module(), Module(library=True)]
    hook.arena_push(_hook.Arena.IO)
    memory = malloc(8 * 512)
    hook.arena_pop()
    def cell(i):
        return memory + 8 * i

    def perform(step, s):
        kind, a, b, d, n = step
        module = modules[n % 2]
        if kind == "mad":
            launch(module.function("mad"), s, u64(cell(a), 2 * n + 3, b), grid=(1 + n, 1, 1))
        elif kind == "join":
            launch(module.function("join"), s, u64(cell(a), cell(b), cell(d)))
        elif kind == "extra":
            launch_extra(module.function("gaps"), s, struct.pack("<B7xdH6xQ", a, float(b), n, cell(d)))
        elif kind == "block":
            words = np.arange(512, dtype=np.uint64) * (n + 1)
            launch_extra(module.function("sum_block"), s, words.tobytes() + struct.pack("<Q", cell(d)))
        elif kind == "count":
            launch(module.function("count"), s, u64(cell(d)))
        elif kind == "copy":
            ok(cu.cuMemcpyDtoDAsync(cell(d), cell(a), 8, s))
        elif kind == "set":
            ok(cu.cuMemsetD8Async(cell(d), n, 8, s))
        elif kind == "programmatic":
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            launch_with(module.function("mad"), s, u64(cell(a), 3, b), [attribute])
        elif kind == "cooperative":
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            launch_with(module.function("mad"), s, u64(cell(a), 5, b), [attribute])

    def body_of(program):
        def body(s):
            for branches in program:
                if len(branches) == 1:
                    for step in branches[0]:
                        perform(step, s)
                    continue
                sides = [stream() for _ in branches]
                fork = event()
                ok(cu.cuEventRecord(fork, s))
                for side, steps in zip(sides, branches, strict=True):
                    ok(cu.cuStreamWaitEvent(side, fork, 0))
                    for step in steps:
                        perform(step, side)
                    joined = event()
                    ok(cu.cuEventRecord(joined, side))
                    ok(cu.cuStreamWaitEvent(s, joined, 0))
        return body

    results = []
    for program in programs:
        graph = capture(body_of(program))
        read = hook.read_graph(int(graph))
        results.append({"graph": plain(read)})
        write_words(memory, [7 * i + 1 for i in range(64)])
        replay(graph, times=2)
        results[-1]["words"] = words(memory, 64)
    report = hook.report()
    answer({"results": results, "record": recorded(hook), "base": report.arena_base, "stride": report.arena_stride,
            "allocations": hook.allocations().tolist(), "memory": memory})
"""

RESTORE = """
    captured = given()
    hook.set_layout(captured["base"], captured["stride"],
                    np.array([tuple(a) for a in captured["allocations"]], _hook.allocation_dtype))
    start()
    hook.arena_push(_hook.Arena.IO)
    memory = malloc(8 * 512)
    hook.arena_pop()
    hook.map_held()
    functions = load(hook, captured["record"])
    out = []
    for one in captured["results"]:
        arrays_of = arrays(one["graph"])
        built = hook.build_graph(arrays_of, np.array(functions, np.uint64))
        again = plain(hook.read_graph(built))
        write_words(memory, [7 * i + 1 for i in range(64)])
        replay(built, times=2)
        out.append([again, words(memory, 64)])
        hook.destroy_graph(built)
    answer([memory, out, hook.report().engine["captures"]])
"""

steps = st.tuples(
    st.sampled_from(
        ["mad", "mad", "mad", "join", "extra", "block", "count", "copy", "set", "programmatic", "cooperative"]
    ),
    st.integers(0, CELLS - 1),
    st.integers(0, CELLS - 1),
    st.integers(0, CELLS - 1),
    st.integers(0, 7),
)


def in_own_cells(branches: list[list[tuple[str, int, int, int, int]]]) -> list[list[tuple[str, int, int, int, int]]]:
    """Branches that run at the same time work on cells of their own, so that the result has one value."""
    return [
        [
            (kind, CELLS * k + a, CELLS * k + b, CELLS * k + d, n if kind != "count" else 2 * n)
            for kind, a, b, d, n in steps
        ]
        for k, steps in enumerate(branches)
    ]


phases = st.one_of(
    st.lists(steps, min_size=1, max_size=6).map(lambda s: [s]),
    st.lists(st.lists(steps, min_size=1, max_size=4), min_size=2, max_size=4).map(in_own_cells),
)
programs = st.lists(st.lists(phases, min_size=1, max_size=4), min_size=3, max_size=6)


def without_races(program: list[Any]) -> list[Any]:
    """``count`` writes a global that branches share: it stays where one stream runs alone."""
    return [
        [[step if len(phase) == 1 or step[0] != "count" else ("mad", *step[1:]) for step in branch] for branch in phase]
        for phase in program
    ]


@pytest.mark.slow
@settings(
    max_examples=5,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # an example is two processes: shrinking would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(programs.map(lambda all_of_them: [without_races(p) for p in all_of_them]))
def test_any_graph_is_itself_again_in_another_process(hooked: Any, chosen: list[Any]) -> None:
    captured = hooked.graphs(CAPTURE, given=chosen)
    memory, restored, captures = hooked.graphs(RESTORE, "restore", given=captured)
    assert memory == captured["memory"]
    assert captures == 0
    for one, (again, words) in zip(captured["results"], restored, strict=True):
        assert again == one["graph"]
        assert words == one["words"]


def test_a_graph_of_every_kind_is_itself_again(hooked: Any) -> None:
    """One fixed program of every step, beside the random ones: quick, and it names what broke."""
    every = ["mad", "join", "extra", "block", "count", "copy", "set", "programmatic", "cooperative"]
    program = [[[(kind, i, i + 1, i + 2, i) for i, kind in enumerate(every)]]]
    program.append(
        in_own_cells([[("mad", 1, 2, 3, 4), ("copy", 1, 0, 5, 1)], [("extra", 1, 2, 3, 5), ("set", 0, 0, 1, 3)]])
    )
    program.append([[("programmatic", 0, 1, 0, 1), ("programmatic", 0, 2, 0, 2), ("mad", 0, 1, 2, 3)]])
    captured = hooked.graphs(CAPTURE, given=[program])
    memory, restored, _ = hooked.graphs(RESTORE, "restore", given=captured)
    assert memory == captured["memory"]
    assert restored[0][0] == captured["results"][0]["graph"]
    assert restored[0][1] == captured["results"][0]["words"]
    nodes = np.frombuffer(base64.b64decode(restored[0][0]["nodes"]), _hook.node_dtype)
    edges = np.frombuffer(base64.b64decode(restored[0][0]["edges"]), _hook.edge_dtype)
    assert {1, 2} <= set(nodes["param_kind"].tolist())
    assert set(edges["type"].tolist()) == {0, 1}


def test_children_are_built_with_their_own_edges(hooked: Any) -> None:
    found = hooked.graphs(
        """
        start()
        module, memory = Module(), malloc(4096)
        inner = capture(lambda s: [launch(module.function("mad"), s, u64(memory, 3, i)) for i in range(4)])
        middle = ok(cu.cuGraphCreate(0))
        child = ok(cu.cuGraphAddChildGraphNode(middle, [], 0, inner))
        ok(cu.cuGraphAddChildGraphNode(middle, [child], 1, inner))
        outer = ok(cu.cuGraphCreate(0))
        ok(cu.cuGraphAddChildGraphNode(outer, [], 0, middle))
        read = hook.read_graph(int(outer))
        functions = np.array([int(module.function("mad"))], np.uint64)
        built = hook.build_graph(read, functions)
        again = hook.read_graph(built)
        values = []
        for graph in (outer, built):
            write_words(memory, [1])
            replay(graph)
            values += words(memory, 1)
        answer([plain(read) == plain(again), values, len(read.children[0].children)])
        """
    )
    assert found[0]
    assert found[1][0] == found[1][1]
    assert found[2] == 2


def test_a_cooperative_kernel_with_packed_parameters_is_rebuilt_with_a_list(hooked: Any) -> None:
    """The driver takes no `extra` for a cooperative node, though a capture makes such nodes."""
    found = hooked.graphs(
        """
        start()
        module, memory = Module(), malloc(4096)
        def body(s):
            launch_extra(module.function("gaps"), s, struct.pack("<B7xdH6xQ", 4, 5.0, 6, memory))
        read = hook.read_graph(int(capture(body)))
        attribute = np.zeros(1, _hook.attribute_dtype)
        attribute["id"], attribute["value"][0, 0] = 2, 1
        nodes = read.nodes.copy()
        nodes["attribute_count"] = 1
        cooperative = _hook.GraphArrays(nodes, read.edges, attribute, read.params)
        built = hook.build_graph(cooperative, np.array([int(module.function("gaps"))], np.uint64))
        again = hook.read_graph(built)
        write_words(memory, [1])
        replay(built)
        answer([read.nodes["param_kind"].tolist(), again.nodes["param_kind"].tolist(),
                again.attributes["id"].tolist(), words(memory, 1)])
        """
    )
    assert found == [[2], [1], [2], [7 + 4 + 5 + 6]]


# Each breaks one thing of a good graph; names are what the message must say.
DAMAGE = {
    "type 99": "nodes['type'][1] = 99",
    "function 7": "nodes['function'][0] = 7",
    "function 4294967295": "nodes['function'][0] = 0xffffffff",
    "parameters that end at byte": "nodes['param_offset'][0] = 0xfffffff0",
    "of kind 1 for function": "nodes['param_bytes'][0] = 8",
    "kind 9": "nodes['param_kind'][0] = 9",
    "of kind 0": "nodes['param_kind'][0] = 0",
    "attributes that end at": "nodes['attribute_first'][0] = 5",
    "attribute 7": "attributes['id'][0] = 7",
    "attribute 13": "attributes['id'][0] = 13",
    "child 3": "nodes['type'][1], nodes['child'][1] = 4, 3",
    "communication group 2": "nodes['type'][1], nodes['comm_group'][1] = 5, 2",
    "not made by comm_reissue": "nodes['type'][1], nodes['comm_group'][1] = 5, 0",
    "not a struct": "nodes['param_bytes'][1] = 32",
    "copies memory of type 77": "params[int(nodes['param_offset'][2]) + 32] = 77",
    "array or reserved": "params[int(nodes['param_offset'][2]) + 56] = 1",
    "to node 9": "edges['to'][0] = 9",
    "from an earlier": "edges['from'][0], edges['to'][0] = 1, 0",
    "two edges": "edges[1] = edges[0]",
    "type 8": "edges['type'][0] = 8",
    "reserved bytes": "edges['reserved'][0, 3] = 1",
    "handle is 0": "functions[0] = 0",
}


def test_damaged_arrays_are_refused_and_leave_nothing(hooked: Any) -> None:
    cases = list(DAMAGE.values())
    found = hooked.graphs(
        """
        cases = given()
        start()
        module, memory = Module(), malloc(4096)
        def body(s):
            launch(module.function("mad"), s, u64(memory, 3, 1))
            ok(cu.cuMemsetD8Async(memory, 1, 8, s))
            ok(cu.cuMemcpyDtoDAsync(memory + 8, memory, 8, s))
        read = hook.read_graph(int(capture(body)))
        out = []
        for case in [*cases, ""]:
            nodes, edges, params = read.nodes.copy(), read.edges.copy(), read.params.copy()
            attributes = np.zeros(1, _hook.attribute_dtype)
            attributes["id"], attributes["value"][0, 0] = 2, 1
            nodes["attribute_count"][0] = 1
            functions = np.array([int(module.function("mad"))], np.uint64)
            exec(case)
            damaged = _hook.GraphArrays(nodes, edges, attributes, params)
            out.append(refusal(lambda: hook.destroy_graph(hook.build_graph(damaged, functions, [12345]))))
        answer(out)
        """,
        given=cases,
    )
    assert found.pop() == ["nothing", ""]  # undamaged
    for (needle, case), (error, text) in zip(DAMAGE.items(), found, strict=True):
        assert error == "UsageError", (case, text)
        assert needle in text, case


def test_any_bytes_as_nodes_are_refused_or_built(hooked: Any) -> None:
    """No array of bytes makes the hook read outside of the arrays it was given."""
    found = hooked.graphs(
        """
        start()
        module = Module()
        random = np.random.default_rng(given())
        functions = np.array([int(module.function("mad"))], np.uint64)
        seen = {}
        for i in range(3000):
            raw = random.integers(0, 256, 64 * 3, dtype=np.uint8)
            raw[random.random(raw.size) < random.random()] = 0
            nodes = raw.view(_hook.node_dtype)
            nodes["type"] %= 7
            edges = random.integers(0, 4, 16 * 2, dtype=np.uint8).view(_hook.edge_dtype).copy()
            if i % 2:
                edges["reserved"] = 0
                edges["from"], edges["to"] = [0, 1], [1, 2]
            params = random.integers(0, 256, int(random.integers(0, 300)), dtype=np.uint8)
            attributes = np.zeros(int(random.integers(0, 3)), _hook.attribute_dtype)
            graph = _hook.GraphArrays(nodes, edges, attributes, params)
            error, text = refusal(lambda: hook.destroy_graph(hook.build_graph(graph, functions)))
            seen[error] = seen.get(error, 0) + 1
        answer(seen)
        """,
        given=7,
    )
    assert found["UsageError"] > 1500
    assert set(found) <= {"UsageError", "DriverCallFailed", "nothing"}


def test_building_needs_a_context(hooked: Any) -> None:
    found = hooked.graphs(
        """
        start()
        read = hook.read_graph(int(ok(cu.cuGraphCreate(0))))
        ok(cu.cuCtxSetCurrent(None))
        answer(refusal(lambda: hook.build_graph(read, np.zeros(0, np.uint64))))
        """
    )
    assert found[0] == "UsageError"
    assert "no context is current" in found[1]


def test_only_the_hooks_own_graphs_are_destroyed_and_once(hooked: Any) -> None:
    found = hooked.graphs(
        """
        start()
        foreign = ok(cu.cuGraphCreate(0))
        built = hook.build_graph(hook.read_graph(int(foreign)), np.zeros(0, np.uint64))
        hook.destroy_graph(built)
        answer([refusal(lambda: hook.destroy_graph(built)), refusal(lambda: hook.destroy_graph(int(foreign))),
                refusal(lambda: hook.destroy_graph(0))])
        """
    )
    assert [error for error, _ in found] == ["UsageError"] * 3
