# SPDX-License-Identifier: Apache-2.0
"""Memory that building keeps from one graph to the next changes no graph, and is for one at a time."""

from __future__ import annotations

from typing import Any

GRAPHS = """
    start()
    module, memory = Module(), malloc(4096)
    function = int(module.function("mad"))
    functions = np.array([function], np.uint64)
    node = hook.read_graph(int(capture(lambda s: [launch(module.function("mad"), s, u64(memory, 3, 1))])))

    def chain(length, early=0, children=()):
        nodes = np.concatenate([node.nodes] * length)
        edges = np.zeros(length - 1, _hook.edge_dtype)
        edges["from"], edges["to"] = np.arange(length - 1), np.arange(1, length)
        edges["from_port"][:early], edges["type"][:early] = 1, 1
        for number in range(len(children)):
            nodes[number] = np.zeros(1, _hook.node_dtype)
            nodes["type"][number], nodes["child"][number] = int(_hook.NodeType.CHILD), number
            nodes["function"][number] = nodes["comm_group"][number] = _hook.NONE
        return _hook.GraphArrays(nodes, edges, node.attributes, node.params, list(children))
"""


def test_a_memory_leaves_nothing_of_one_graph_to_the_next(hooked: Any) -> None:
    """Large and small ones, with edge data and without, with children, and ones that fail at the end."""
    found = hooked.graphs(
        GRAPHS
        + """
    family = chain(30, children=[chain(20, 5), chain(3, children=[chain(4), chain(40, 8)])])
    broken = chain(600, 40)
    broken.nodes["param_bytes"][-1] = 8
    graphs = [chain(500, 100), chain(2), family, chain(700), chain(5, 2), chain(1), family, chain(500, 499)]
    kept, out = hook.build_memory(), []
    for graph in graphs:
        texts = []
        for build_memory in (None, kept):
            built = hook.build_graph(graph, functions, [], build_memory)
            texts.append(plain(hook.read_graph(built)))
            hook.destroy_graph(built)
        out.append([texts[0] == texts[1], refusal(lambda: hook.build_graph(broken, functions, [], kept))[0]])
    answer([out, len({str(plain(graph)) for graph in graphs})])
        """
    )
    assert found == [[[True, "UsageError"]] * 8, 7]


def test_two_graphs_are_never_built_with_one_memory_at_the_same_time(hooked: Any) -> None:
    """Threads that try it get their graph, or are told."""
    found = hooked.graphs(
        GRAPHS
        + """
    import threading, time
    graph, kept, context = chain(1500, 300), hook.build_memory(), ok(cu.cuCtxGetCurrent())
    built = hook.build_graph(graph, functions)
    expected = plain(hook.read_graph(built))
    refused, wrong, end = [], [], time.monotonic() + 60

    def build():
        ok(cu.cuCtxSetCurrent(context))
        while not refused and time.monotonic() < end:
            built = []
            error, text = refusal(lambda: built.append(hook.build_graph(graph, functions, [], kept)))
            if built:
                wrong.extend(() if plain(hook.read_graph(built[0])) == expected else ["graph"])
                hook.destroy_graph(built[0])
            else:
                refused.append([error, text])

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    built = hook.build_graph(graph, functions, [], kept)
    answer([refused[0], wrong, plain(hook.read_graph(built)) == expected])
        """
    )
    (error, text), wrong, again = found
    assert error == "UsageError"
    assert "two graphs are built with one memory at the same time" in text
    assert (wrong, again) == ([], True)
