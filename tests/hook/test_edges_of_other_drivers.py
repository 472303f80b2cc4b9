# SPDX-License-Identifier: Apache-2.0
"""Building a graph finds out when the driver holds other edges than it was given."""

from __future__ import annotations

from typing import Any

# What becomes of the driver's answer, four edges in any order of which one has data, and whether that is refused.
ANSWERS = {
    "": False,
    "order([3, 1, 0, 2])": False,
    "data[plain] = data[early]": True,
    "data[early] = data[plain]": True,
    "data[plain] = 1": True,
    "data[early] += 1 << 8": True,
    "from_[plain], to[plain] = from_[early], to[early]": True,
    "from_[0], from_[1], to[0], to[1], data[0], data[1] = from_[1], from_[1], to[1], to[1], data[1], data[1]": True,
    "from_[plain] ^= 16": True,
    "to[early], to[plain] = to[plain], to[early]": True,
    "count[0] -= 1": True,
}


def test_a_driver_that_makes_other_edges_is_refused(hooked: Any) -> None:
    found = hooked.graphs(
        """
        class Instead:
            # A function of the driver that does as `change` says with what it answers.
            def __init__(self, name, kind, change):
                self.address = c.cast(c.CDLL("libcuda.so.1")[name], c.c_void_p).value
                self.function, self.change, self.mine = kind(self.address), change, kind(self.call)
                page, pages = self.address & ~4095, 8192
                assert c.CDLL(None).mprotect(c.c_void_p(page), c.c_size_t(pages), 7) == 0
                self.jump = b"\\x48\\xb8" + struct.pack("<Q", c.cast(self.mine, c.c_void_p).value) + b"\\xff\\xe0"
                self.code = c.string_at(self.address, len(self.jump))
                c.memmove(self.address, self.jump, len(self.jump))
            def call(self, *arguments):
                c.memmove(self.address, self.code, len(self.code))
                try:
                    return self.function(*arguments)
                finally:
                    self.change(*arguments)
                    c.memmove(self.address, self.jump, len(self.jump))

        cases = given()
        start()
        module, memory = Module(), malloc(4096)
        read = hook.read_graph(int(capture(lambda s: [launch(module.function("mad"), s, u64(memory, 3, 1))] * 4)))
        nodes = np.concatenate([read.nodes[:1]] * 4)
        edges = np.zeros(4, _hook.edge_dtype)
        edges["from"], edges["to"] = [0, 0, 1, 2], [1, 2, 3, 3]
        edges["from_port"][1], edges["type"][1] = 1, 1
        graph = _hook.GraphArrays(nodes, edges, read.attributes, read.params)
        functions = np.array([int(module.function("mad"))], np.uint64)

        case = ""
        def change(graph, from_, to, data, count):
            if not from_:
                return
            rows = range(count[0])
            early = next(i for i in rows if data[i])
            plain = next(i for i in rows if not data[i])
            def order(places):
                for column in (from_, to, data):
                    for place, value in enumerate([column[i] for i in places]):
                        column[place] = value
            exec(case)
        words = c.POINTER(c.c_uint64)
        kind = c.CFUNCTYPE(c.c_int, c.c_void_p, words, words, words, c.POINTER(c.c_size_t))
        changed = Instead("cuGraphGetEdges_v2", kind, change)
        out = []
        for case in cases:
            out.append(refusal(lambda: hook.destroy_graph(hook.build_graph(graph, functions))))
        answer(out)
        """,
        given=list(ANSWERS),
    )
    for (case, refused), (error, text) in zip(ANSWERS.items(), found, strict=True):
        assert error == ("DriverCallFailed" if refused else "nothing"), (case, text)
        assert ("this driver cannot hold the graph" in text) is refused, case
