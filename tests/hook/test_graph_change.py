# SPDX-License-Identifier: Apache-2.0
"""Kernels of an executable get other parameters, and a trial that did has the same effect as one on a new graph."""

from __future__ import annotations

from typing import Any

# Three kernels in a row multiply and add into the first word; a fill of the second word follows.
GRAPH = """
    from foundryd.capture.canonical import Graph
    from foundryd.capture.rehearsal import Rehearsal
    from foundryd.errors import DriverCallFailed
    from foundryd.session.driver import call
    from types import SimpleNamespace
    start()
    module, memory = Module(), malloc(4096)
    functions = np.array([int(module.function("mad"))], np.uint64)
    def body(s):
        for i in (2, 3, 4):
            launch(module.function("mad"), s, u64(memory, i, i))
        ok(cu.cuMemsetD8Async(memory + 8, 1, 8, s))
    read = hook.read_graph(int(capture(body)))
    read.nodes["function"][read.nodes["type"] == 0] = 0
    graph = Graph(("g",), read.nodes, read.edges, read.attributes, read.params)
    places = [int(o) for o in read.nodes["param_offset"]]
    def with_words(*changes):
        params = graph.params.copy()
        for node, word, value in changes:
            at = places[node] + 8 * word
            params[at:at + 8] = np.array([value], np.uint64).view(np.uint8)
        return params
    stream = call("cuStreamCreate", 1)
    bindings = SimpleNamespace(functions=functions, relocate=lambda block, relocations: None)
    none = np.zeros(0, np.uint8)
    def rehearsal():
        return Rehearsal(hook, graph, none, bindings, SimpleNamespace(handles=[]), int(stream))
    def after(one, params):
        write_words(memory, [1, 0])
        one.replay(params)
        return words(memory, 2)
"""


def test_trials_on_one_executable_have_the_effect_of_trials_on_new_graphs(hooked: Any) -> None:
    shared, alone, built, seen = hooked.graphs(
        GRAPH
        + """
    random = np.random.default_rng(3)
    trials = [graph.params]
    for _ in range(40):
        chosen = random.integers(0, 3, random.integers(0, 4)).tolist()
        trials.append(with_words(*((node, int(random.integers(1, 3)), int(random.integers(1, 9))) for node in chosen)))
        trials.append(graph.params)
    with rehearsal() as one:
        shared = [after(one, params) for params in trials]
        built = one.built
    alone = []
    for params in trials:
        with rehearsal() as one:
            alone.append(after(one, params))
    answer([shared, alone, built, len({str(w) for w in shared})])
    """
    )
    assert shared == alone
    assert built == 1
    assert seen > 10


def test_what_an_executable_does_not_take_comes_with_a_new_graph(hooked: Any) -> None:
    """Bytes of a fill, and a kernel that the driver refuses; neither is left behind."""
    results, built = hooked.graphs(
        GRAPH
        + """
    fill = int(np.flatnonzero(read.nodes["type"] == 2)[0])
    raw = graph.params[places[fill]:places[fill] + int(read.nodes["param_bytes"][fill])]
    ones = graph.params.copy()
    at = places[fill] + int(np.flatnonzero(raw.view(np.uint32) == 1)[0]) * 4
    ones[at] = 2
    results, built = [], []
    with rehearsal() as one:
        for params in (graph.params, ones, graph.params):
            results.append(after(one, params))
            built.append(one.built)
        real = one._current.set_kernel_params
        def refused(params, which):
            real(params, which[:1])
            raise DriverCallFailed("cuGraphExecKernelNodeSetParams_v2 failed with CUDA_ERROR_NOT_SUPPORTED")
        one._current.set_kernel_params = refused
        results.append(after(one, with_words((0, 1, 7), (2, 1, 5))))
        built.append(one.built)
        results.append(after(one, graph.params))
        built.append(one.built)
    with rehearsal() as one:
        results.append(after(one, with_words((0, 1, 7), (2, 1, 5))))
    answer([results, built])
    """
    )
    plain, filled, again, refused, after, alone = results
    assert filled[1] == 2 * plain[1]
    assert plain == again == after
    assert refused == alone != plain
    assert built == [1, 2, 3, 4, 4]


def test_places_and_nodes_that_do_not_fit_are_refused(hooked: Any) -> None:
    found = hooked.graphs(
        GRAPH
        + """
    built, nodes = hook.build_graph_and_nodes(read, functions)
    executable = call("cuGraphInstantiate", cu.CUgraph(built), 0)
    fill = int(np.flatnonzero(read.nodes["type"] == 2)[0])
    def change(which, made=nodes):
        which = np.array(which, np.uint32)
        return refusal(lambda: hook.set_kernel_params(int(executable), read, functions, made, which))
    answer([len(nodes), change([0, 2]), change([9]), change([fill]), change([0], nodes[:1])])
    """
    )
    assert found[0] == 4
    assert found[1][0] == "nothing"
    for (error, text), needle in zip(found[2:], ("no node 9", "no kernel", "4 nodes and 1 were built"), strict=True):
        assert error == "UsageError"
        assert needle in text
