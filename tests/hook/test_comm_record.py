# SPDX-License-Identifier: Apache-2.0
"""Collectives under capture: recorded in order, each (group, communicator) with its placeholder."""

from __future__ import annotations

import os
import textwrap
from typing import Any

import pytest

from foundryd import _native
from foundryd._native import _hook

PRELUDE = """
from ncclkit import MAX, SUM, Nccl
start()
nccl, module, memory = Nccl(), Module(), malloc(1 << 16)
mad = module.function("mad")
def at(i):
    return memory + 1024 * i
def op_fields(names):
    return [[int(o[n]) for n in names.split()] for o in hook.comm_ops()]
"""


def record(hooked: Any, body: str, mode: str = "capture", **options: Any) -> Any:
    return hooked.graphs(PRELUDE + textwrap.dedent(body), mode, preload=[_native.fake_nccl()], **options)


def test_every_kind_of_call_is_recorded_with_its_arguments(hooked: Any) -> None:
    memory, ops, groups, types = record(
        hooked,
        """
        comm = nccl.init(4, 2)
        def body(s):
            launch(mad, s, u64(at(0), 2, 1))
            comm.every_kind(at(1), at(20), 8, 3, s)
            launch(mad, s, u64(at(0), 2, 1))
        read = hook.read_graph(int(capture(body)))
        answer([memory, op_fields("kind send recv count datatype reduction peer communicator group"),
                read.nodes["comm_group"].tolist(), read.nodes["type"].tolist()])
        """,
    )
    none, send, recv = _hook.NONE, memory + 1024, memory + 20 * 1024
    assert ops == [
        [0, send, recv, 8, 5, 0, none, 0, 0],
        [1, send, recv, 8, 5, none, none, 0, 1],
        [2, send, recv, 8, 5, 0, none, 0, 2],
        [3, send, recv, 8, 5, none, 3, 0, 3],
        [4, send, recv, 8, 5, 2, 3, 0, 4],
        [5, send, recv, 8, 5, none, none, 0, 5],
        [6, send, recv, 8, 5, none, 3, 0, 6],
        [7, send, recv, 8, 5, none, 3, 0, 7],
        [8, send, 0, 8, 5, none, 3, 0, 8],
        [9, 0, recv, 8, 5, none, 3, 0, 8],
    ]
    assert groups == [none, *range(9), none]
    assert types == [0, *[5] * 9, 0]


def test_a_group_is_one_placeholder_for_each_communicator(hooked: Any) -> None:
    ops, groups, edges = record(
        hooked,
        """
        a, b = nccl.init(4, 2), nccl.init(2, 0)
        def body(s):
            with nccl.group():
                a.all_reduce(at(1), at(2), 8, s)
                with nccl.group():
                    b.all_reduce(at(3), at(4), 8, s)
                    a.all_gather(at(5), at(6), 8, s)
                b.all_gather(at(7), at(8), 8, s)
            a.all_reduce(at(1), at(2), 8, s)
        read = hook.read_graph(int(capture(body)))
        answer([op_fields("communicator group kind"), read.nodes["comm_group"].tolist(),
                read.edges[["from", "to"]].tolist()])
        """,
    )
    assert ops == [[0, 0, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1], [0, 2, 0]]
    assert groups == [0, 1, 2]
    assert edges == [[0, 1], [1, 2]]


def test_a_group_over_several_streams_finds_each_placeholder(hooked: Any) -> None:
    """The work goes on the stream that joined last, and the others wait for it."""
    ops, nodes, edges = record(
        hooked,
        """
        a, b = nccl.init(4, 2), nccl.init(2, 0)
        def body(s):
            side, other = stream(), stream()
            launch(mad, s, u64(at(0), 2, 1))
            with forked(s, side), forked(s, other):
                launch(mad, side, u64(at(1), 2, 1))
                with nccl.group():
                    a.all_reduce(at(1), at(2), 8, s)
                    a.all_reduce(at(3), at(4), 8, side)
                    a.all_reduce(at(5), at(6), 8, s)
                    b.all_reduce(at(7), at(8), 8, other)
            launch(mad, s, u64(at(0), 2, 1))
        read = hook.read_graph(int(capture(body)))
        answer([op_fields("communicator group"), read.nodes[["type", "comm_group"]].tolist(),
                read.edges[["from", "to"]].tolist()])
        """,
    )
    assert sorted(ops) == [[0, 0], [0, 0], [0, 0], [1, 1]]
    placeholders = [group for kind, group in nodes if kind == 5]
    assert sorted(placeholders) == [0, 1]
    last = len(nodes) - 1
    assert nodes[last][0] == 0
    assert {frm for frm, to in edges if to == last} >= {i for i, (kind, _) in enumerate(nodes) if kind == 5}


def test_calls_outside_of_captures_are_not_recorded(hooked: Any) -> None:
    found = record(
        hooked,
        """
        comm = nccl.init(4, 2)
        eager = stream()
        comm.all_reduce(at(1), at(2), 8, eager)
        def body(s):
            comm.all_gather(at(1), at(2), 8, eager)  # meanwhile, elsewhere
            comm.reduce_scatter(at(1), at(2), 8, s)
            comm.all_reduce(at(1), at(2), 0, s)  # nothing to do, no node
        read = hook.read_graph(int(capture(body)))
        answer([op_fields("kind group"), read.nodes["type"].tolist()])
        """,
    )
    assert found == [[[2, 0]], [5]]


def test_equal_groups_of_two_graphs_keep_records_of_their_own(hooked: Any) -> None:
    ops, groups = record(
        hooked,
        """
        comm = nccl.init(4, 2)
        read = [hook.read_graph(int(capture(lambda s: comm.all_reduce(at(1), at(2), 8, s)))) for _ in range(2)]
        answer([op_fields("kind send recv count communicator group"), [g.nodes["comm_group"].tolist() for g in read]])
        """,
    )
    assert [o[:5] for o in ops] == [ops[0][:5]] * 2
    assert [o[5] for o in ops] == [0, 1]
    assert groups == [[0], [1]]


def test_a_communicator_of_one_rank_makes_plain_copies(hooked: Any) -> None:
    found = record(
        hooked,
        """
        alone = nccl.init(1, 0)
        def body(s):
            alone.all_reduce(at(1), at(2), 8, s)
            alone.all_reduce(at(1), at(1), 8, s)
        read = hook.read_graph(int(capture(body)))
        answer([len(hook.comm_ops()), read.nodes["type"].tolist()])
        """,
    )
    assert found == [0, [1]]


def test_communicators_have_slots_in_creation_order(hooked: Any) -> None:
    rows, ranks, handles, refusals = record(
        hooked,
        """
        world = nccl.init(8, 5)
        with nccl.group():
            alone = nccl.init(1, 0)
        tensor = world.split(2, 5)
        none = world.split(-1, 0)
        hook.comm_declare(tensor.handle, [4, 5])
        hook.comm_declare(world.handle, range(8))
        hook.comm_declare(tensor.handle, [4, 5])
        refusals = [refusal(lambda: hook.comm_declare(world.handle, range(7))),
                    refusal(lambda: hook.comm_declare(world.handle, [0, 1, 2, 3, 4, 5, 6, 6])),
                    refusal(lambda: hook.comm_declare(12345, [0])),
                    refusal(lambda: hook.comm_declare(0, [0])),
                    refusal(lambda: hook.comm_declare(world.split(3, 0).handle, [6, 7]))]
        tensor.destroy()
        again = nccl.init(2, 1)
        rows, ranks = hook.communicators()
        names = ("slot", "size", "rank", "live", "member_first", "member_count", "declared")
        answer([[[int(r[n]) for n in names] for r in rows],
                ranks.tolist(), [int(rows[i]["handle"]) == comm for i, comm in ((0, world.handle), (4, again.handle))],
                refusals])
        """,
        env={"RANK": "5"},
    )
    assert [row[:4] for row in rows] == [[0, 8, 5, 1], [1, 1, 0, 1], [2, 2, 1, 0], [3, 8, 5, 1], [4, 2, 1, 1]]
    assert [row[4:6] for row in rows[:3]] == [[0, 8], [8, 0], [8, 2]]
    none = 2**32 - 1
    assert [row[6] for row in rows] == [1, none, 0, none, none]
    assert ranks == [*range(8), 4, 5]
    assert handles == [True, True]
    assert [error for error, _ in refusals] == [
        "UsageError",
        "UsageError",
        "RestoreError",
        "RestoreError",
        "UsageError",
    ]
    assert "7" in refusals[0][1]
    assert "RANK" in refusals[4][1]


def test_a_declared_split_behaves_at_its_true_size(hooked: Any) -> None:
    """Alone in its world the stub cannot know who else has the colour; the declaration tells it."""
    found = record(
        hooked,
        """
        tensor = nccl.init(8, 5).split(2, 5)
        hook.comm_declare(tensor.handle, [4, 5])
        write_words(at(0), [0] * 64)
        write_words(at(1), [7])
        s = stream()
        tensor.all_gather(at(1), at(0), 1, s)
        answer(words(at(0), 3))
        """,
        env={"RANK": "5"},
    )
    assert found == [7, 7, 0]


def test_a_library_that_makes_other_nodes_makes_the_graph_unreadable(hooked: Any, compile_c: Any) -> None:
    """A placeholder that is not known as one would be restored as the copy that it is."""
    odd = compile_c(
        "libnccl.so.2.so",
        """
        #include <stddef.h>
        typedef struct { char bytes[128]; } id;
        extern int cuMemsetD8Async(unsigned long long, unsigned char, size_t, void *);
        int ncclCommInitRank(void **comm, int size, id unique, int rank) { *comm = (void *)8; return 0; }
        int ncclAllReduce(const void *s, void *r, size_t n, int t, int o, void *comm, void *stream) {
          for (int i = 0; i < 2; ++i)
            if (cuMemsetD8Async((unsigned long long)r, 0, 8 * n, stream)) return 1;
          return 0;
        }
        """,
        cuda=True,
    )
    found = hooked.graphs(
        """
        from ncclkit import Nccl
        start()
        nccl, memory = Nccl(), malloc(4096)
        nccl.library = c.CDLL(None)
        comm = nccl.init(4, 2)
        graph = capture(lambda s: comm.all_reduce(memory, memory + 64, 8, s))
        answer([refusal(lambda: hook.read_graph(int(graph))), len(hook.comm_ops())])
        """,
        preload=[odd],
    )
    assert found[0][0] == "UnsupportedNode"
    assert "added 2 nodes" in found[0][1]
    assert found[1] == 0


# Captures a sum on ``comm`` that the program itself defined.
OWN_REDUCTION = """
scale, made = c.c_double(0.5), c.c_int()
nccl("ncclRedOpCreatePreMulSum", c.byref(made), c.byref(scale), 8, 1, c.c_void_p(comm.handle))
def body(s):
    nccl("ncclAllReduce", c.c_void_p(at(1)), c.c_void_p(at(2)), c.c_size_t(8), 8, made, c.c_void_p(comm.handle),
         c.c_void_p(int(s)))
graph = capture(body)
"""


def test_a_reduction_that_the_program_made_is_refused(hooked: Any) -> None:
    found = record(
        hooked,
        "comm = nccl.init(4, 2)"
        + OWN_REDUCTION
        + "answer([made.value, *refusal(lambda: hook.read_graph(int(graph)))])",
    )
    assert found[0] >= 5
    assert found[1] == "UnsupportedNode"
    assert f"reduction {found[0]}" in found[2]


@pytest.mark.parametrize("mode", ["", "restore"])
def test_nothing_is_recorded_outside_of_capture_mode(hooked: Any, mode: str) -> None:
    found = record(
        hooked,
        """
        comm = nccl.init(4, 2)
        def body(s):
            comm.all_reduce(at(1), at(2), 8, s)
        capture(body)
        answer([len(hook.comm_ops()), len(hook.communicators()[0])])
        """,
        mode=mode,
    )
    assert found == [0, 1 if mode else 0]


FOLLOWED = """
comm = nccl.init(4, 2)
def body(s):
    launch(mad, s, u64(at(0), 2, 1))
    comm.all_reduce(at(1), at(2), 8, s)
    launch(mad, s, u64(at(0), 3, 1))
    comm.all_gather(at(3), at(4), 8, s)
def seen(graph):
    read = hook.read_graph(int(graph))
    return [read.nodes["type"].tolist(), read.nodes["comm_group"].tolist(), [
        [inner.nodes["type"].tolist(), inner.nodes["comm_group"].tolist()] for inner in read.children]]
def node_params(child):
    params = cu.CUgraphNodeParams()
    params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = child
    return params
graph = capture(body)
"""
NONE, COMM = _hook.NONE, 5
WHOLE = [[0, COMM, 0, COMM], [NONE, 0, NONE, 1]]


def test_collectives_of_a_clone_are_those_of_its_original(hooked: Any) -> None:
    """To the driver a placeholder is a node like any other; unknown it would be restored as the copy that it is."""
    clone, later, second = record(
        hooked,
        FOLLOWED
        + """
clone = ok(cu.cuGraphClone(graph))
of_clone = ok(cu.cuGraphClone(clone))
first = seen(clone)
ok(cu.cuGraphDestroy(graph))
answer([first, seen(clone), seen(of_clone)])
""",
    )
    assert clone == later == second == [*WHOLE, []]


@pytest.mark.parametrize("how", ["AddChildGraphNode", "AddNode"])
def test_collectives_inside_a_child_graph_are_found(hooked: Any, how: str) -> None:
    add = {
        "AddChildGraphNode": "cu.cuGraphAddChildGraphNode(outer, [], 0, graph)",
        "AddNode": "cu.cuGraphAddNode(outer, [], [], 0, node_params(graph))",
    }[how]
    outer, deep = record(
        hooked,
        FOLLOWED
        + f"""
outer = ok(cu.cuGraphCreate(0))
ok({add})
ok(cu.cuGraphDestroy(graph))
answer([seen(outer), seen(ok(cu.cuGraphChildGraphNodeGetGraph(ok(cu.cuGraphGetNodes(outer, 1))[0][0])))])
""",
    )
    assert outer == [[4], [NONE], [WHOLE]]
    assert deep == [*WHOLE, []]


def test_collectives_too_deep_to_follow_are_refused(hooked: Any) -> None:
    refused, clone = record(
        hooked,
        FOLLOWED
        + """
middle, outer = ok(cu.cuGraphCreate(0)), ok(cu.cuGraphCreate(0))
ok(cu.cuGraphAddChildGraphNode(middle, [], 0, graph))
ok(cu.cuGraphAddChildGraphNode(outer, [], 0, middle))
clone = ok(cu.cuGraphClone(middle))
answer([refusal(lambda: hook.read_graph(int(g))) for g in (outer, clone)])
""",
    )
    for kind, text in (refused, clone):
        assert kind == "UnsupportedNode"
        assert "capture the collectives in the graph itself" in text


def test_a_clone_or_parent_of_a_graph_that_cannot_be_read_cannot_be_read_either(hooked: Any) -> None:
    """The reduction is the program's own."""
    refusals = record(
        hooked,
        FOLLOWED
        + OWN_REDUCTION
        + """
outer = ok(cu.cuGraphCreate(0))
ok(cu.cuGraphAddChildGraphNode(outer, [], 0, graph))
answer([refusal(lambda: hook.read_graph(int(g))) for g in (graph, ok(cu.cuGraphClone(graph)), outer)])
""",
    )
    assert [(kind, "a collective uses reduction" in text) for kind, text in refusals] == [("UnsupportedNode", True)] * 3


@pytest.mark.skipif("SANITIZER_PRELOAD" in os.environ, reason="a sanitizer gives no handle out again")
def test_a_node_that_takes_the_handle_of_a_removed_collective_is_none(hooked: Any) -> None:
    """The software driver gives a freed handle out again at once."""
    same, after, failed = record(
        hooked,
        FOLLOWED
        + """
graph = capture(lambda s: comm.all_reduce(at(1), at(2), 8, s))
(node,) = ok(cu.cuGraphGetNodes(graph, 1))[0]
ok(cu.cuGraphDestroyNode(node))
fresh = ok(cu.cuGraphAddEmptyNode(graph, [], 0))
after = seen(graph)[0]
# Refused while the graph is captured: the placeholder stays one.
on = stream()
ok(cu.cuStreamBeginCapture(on, THREAD_LOCAL))
comm.all_reduce(at(1), at(2), 8, on)
nodes = ok(cu.cuStreamGetCaptureInfo(on))[3]
code = cu.cuGraphDestroyNode(nodes[0])[0]
kept = ok(cu.cuStreamEndCapture(on))
answer([int(node) == int(fresh), after, [int(code) != 0, seen(kept)[0]]])
""",
    )
    assert same
    assert after == [3]
    assert failed == [True, [COMM]]


def test_memory_of_the_communication_library_is_refused_in_kernels_and_collectives(hooked: Any) -> None:
    """The stub's lies elsewhere than the library's, maybe in every capture at one place."""
    refusals = record(
        hooked,
        """
        comm, theirs = nccl.init(4, 2), c.c_void_p()
        nccl("ncclMemAlloc", c.byref(theirs), c.c_size_t(4096))
        def read(body):
            graph = capture(body)
            return refusal(lambda: hook.read_graph(int(graph)))
        answer([
            read(lambda s: launch(mad, s, u64(theirs.value + 8, 2, 1))),
            read(lambda s: comm.all_reduce(theirs.value, at(2), 8, s)),
            read(lambda s: comm.all_reduce(at(1), theirs.value, 8, s)),
            read(lambda s: comm.all_reduce(at(1), at(2), 8, s)),
        ])
        """,
    )
    assert [kind for kind, _ in refusals] == [*["UnsupportedNode"] * 3, "nothing"]
    assert all("ncclMemAlloc" in text for _, text in refusals[:3])
