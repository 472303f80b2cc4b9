# SPDX-License-Identifier: Apache-2.0
"""The driver's own cost of the graphs of an archive, without hook and without session.  The last line is JSON."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np

from foundryd.archive.format import image_section
from foundryd.archive.members import TemplateReader
from foundryd.archive.reader import ArchiveReader
from foundryd.session.driver import call


def main(path: str, library: str, count: int) -> None:
    cost = ctypes.CDLL(library).floor_cost
    reader = ArchiveReader.open(path)
    variant = reader.index.variants[0]
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    modules = [call("cuModuleLoadData", bytes(reader.section(image_section(m.digests[0])))) for m in variant.modules]
    functions = np.array(
        [int(call("cuModuleGetFunction", modules[f.module], f.name.encode())) for f in variant.functions], np.uint64
    )
    offsets = np.array([offset for f in variant.functions for offset, _ in f.fields], np.uint32)
    first = np.cumsum([0, *(len(f.fields) for f in variant.functions)]).astype(np.uint32)
    templates = [TemplateReader(reader, template) for template in variant.templates]
    rows: dict[str, list[float]] = {"build": [], "instantiate": []}
    out = np.zeros(2, np.float64)

    def pointer(array: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    for place, member in list(enumerate(variant.members))[:count]:
        template = templates[member.template]
        graph = template.graph(template.template.members.index(place))
        status = cost(
            pointer(graph.nodes),
            ctypes.c_size_t(len(graph.nodes)),
            pointer(graph.edges),
            ctypes.c_size_t(len(graph.edges)),
            pointer(graph.attributes),
            pointer(graph.params),
            pointer(functions),
            pointer(offsets),
            pointer(first),
            pointer(out),
        )
        assert status == 0, f"the driver answered {status}"
        rows["build"].append(float(out[0]))
        rows["instantiate"].append(float(out[1]))
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
