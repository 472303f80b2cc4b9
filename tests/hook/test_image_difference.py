# SPDX-License-Identifier: Apache-2.0
"""An image that is not, to whoever loads it, the one of a module is told from it."""

from __future__ import annotations

from typing import Any

import pytest

# What of the module's image is asked for; `lie` gives another and has the same size, so that nothing else differs.
COMPARE = """
    start()
    module = Module(library={library})
    out = malloc(8)
    hook.read_graph(int(capture(lambda s: launch(module.function("mad"), s, u64(out, 1, 1)))))
    alone = loadable(elf())
    def lie(old, new):
        assert alone.count(old) >= 1 and len(old) == len(new)
        return alone.replace(old, new)
    def differs(image, functions=("mad", "gaps"), names=("counter", "table", "zeroed", "aimed", "nobody")):
        return hook.image_difference(0, image, list(functions), list(names))
    before = len(hook.modules())
"""


@pytest.fixture
def compared(hooked: Any) -> Any:
    """Runs a body behind ``COMPARE`` with the image loaded as a module and as a library; both answers have to agree."""

    def run(body: str) -> Any:
        imports = "from foundryd.capture.images.elf import loadable\n"
        answers = [
            hooked.graphs(imports + _dedent(COMPARE.format(library=library)) + _dedent(body))
            for library in (False, True)
        ]
        assert answers[0] == answers[1]
        return answers[0]

    return run


def _dedent(text: str) -> str:
    return "\n".join(line[4:] for line in text.splitlines()) + "\n"


def test_the_code_alone_is_the_same_as_in_its_container_and_leaves_nothing(compared: Any) -> None:
    assert compared(
        """
    answer([differs(alone), differs(image()), differs(elf()[: len(alone)]), len(hook.modules()) - before])
    """
    ) == ["", "", "", 0]


def test_a_function_that_is_missing_or_has_other_parameters_is_seen(compared: Any) -> None:
    missing, same, exchanged = compared(
        """
    gone = lie(b"mad\\0", b"mud\\0")
    swapped = lie(b"join\\0", b"jxxn\\0").replace(b"gaps\\0", b"join\\0")
    answer([differs(gone), differs(gone, ["gaps"]), differs(swapped, ["mad", "join"])])
    """
    )
    assert missing == "has no function mad"
    assert same == ""
    assert exchanged == "gives join 4 parameters in 32 bytes, not the same 3 in 24"


def test_a_global_that_starts_otherwise_is_seen_unless_the_program_changed_it(compared: Any) -> None:
    other, changed, missing = compared(
        """
    words = struct.pack("<4I", 1, 2, 3, 4)
    wrong = lie(words, struct.pack("<4I", 1, 9, 3, 4))
    first = differs(wrong)
    ok(cu.cuMemcpyHtoD(module.global_address("table")[0], b"x", 1))
    answer([first, differs(wrong), differs(loadable(elf("driver_tests")), [], ["counter"])])
    """
    )
    assert other == "starts the global table otherwise"
    assert changed == ""  # the archive brings its bytes
    assert missing == "has no global counter"


def test_what_the_driver_does_not_load_is_seen(compared: Any) -> None:
    refused, cut, foreign = compared(
        """
    refused = differs(lie(b"softcuda_image_table", b"softcuda_image_tabel"))
    answer([refused.replace("cuModuleLoadData", "CALL").replace("cuLibraryGetKernel", "CALL"),  # libraries load late
            differs(alone[:-1]), differs(b"")])
    """
    )
    assert refused.startswith("is not loaded: the driver call CALL failed with CUresult 200")
    assert cut == foreign == "is not one image"


def test_it_is_refused_where_nothing_can_be_compared(hooked: Any) -> None:
    found = hooked.graphs(
        """
        start()
        module = ok(cu.cuModuleLoadData(image()))
        Module()
        ok(cu.cuModuleUnload(module))
        answer([refusal(lambda: hook.image_difference(0, elf(), [], [])),
                refusal(lambda: hook.image_difference(1, elf(), ["nobody"], [])),
                refusal(lambda: hook.image_difference(9, elf(), [], []))])
        """
    )
    assert [error for error, _ in found] == ["UsageError", "UnsupportedNode", "UsageError"]
