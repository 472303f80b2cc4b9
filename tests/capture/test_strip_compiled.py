# SPDX-License-Identifier: Apache-2.0
"""What compilers of CUDA make is stripped like what tests build, and tools that read cubins find nothing amiss.

It takes ``ptxas``, and ``nvlink`` for functions in sections of their own; ``readelf`` and ``cuobjdump`` are asked where
they are there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from itertools import chain, combinations
from pathlib import Path

import pytest

from foundryd.capture.images import elf, stripped
from foundryd.errors import UnreadableImage

sys.path.insert(0, str(Path(__file__).parent))
from image_programs import Meaning, Parts

pytestmark = pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not there")

# Kernels with what refers to other things: shared and local memory, constants, variables, functions of the device, a
# branch by a table, the driver's printf, launch bounds.
PTX = """
.version 8.0
.target {target}
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);
.global .align 4 .u32 counter = 7;
.global .align 4 .u32 zero;
.const .align 4 .u32 table[4] = {{1, 2, 3, 4}};
.global .align 1 .b8 $format[4] = {{37, 100, 10, 0}};
.func (.param .u32 r) square(.param .u32 x);
.func (.param .u32 r) more(.param .u32 x);
.global .align 8 .u64 functions[2] = {{square, more}};
.func (.param .u32 r) square(.param .u32 x)
{{
    .reg .u32 a; .reg .u32 b;
    ld.param.u32 a, [x]; mul.lo.u32 b, a, a; st.param.u32 [r], b; ret;
}}
.func (.param .u32 r) more(.param .u32 x)
{{
    .reg .u32 a; .reg .u32 b;
    ld.param.u32 a, [x]; add.u32 b, a, 5; st.param.u32 [r], b; ret;
}}
.visible .entry shares(.param .u64 to) .reqntid 64, 1, 1
{{
    .shared .align 16 .b8 block[256];
    .reg .u64 p; .reg .u32 x; .reg .u32 y;
    ld.param.u64 p, [to]; ld.global.u32 x, [p]; ld.const.u32 y, [table+4]; add.u32 x, x, y;
    st.shared.u32 [block], x; bar.sync 0; ld.shared.u32 x, [block+4];
    {{
        .param .u32 a; .param .u32 r;
        st.param.u32 [a], x; call.uni (r), square, (a); ld.param.u32 x, [r];
    }}
    st.global.u32 [p], x; ret;
}}
.visible .entry prints(.param .u64 to, .param .u64 unused)
{{
    .local .align 8 .b8 words[16];
    .reg .u64 p; .reg .u64 text; .reg .u64 at; .reg .u32 x;
    ld.param.u64 p, [to]; ld.global.u32 x, [counter]; cvta.local.u64 at, words; cvta.global.u64 text, $format;
    {{
        .param .b64 a; .param .b64 b; .param .b32 r;
        st.param.b64 [a], text; st.param.b64 [b], at; call.uni (r), vprintf, (a, b);
    }}
    st.global.u32 [p], x; ret;
}}
.visible .entry chooses(.param .u64 to, .param .u32 which)
{{
    .reg .u64 p; .reg .u64 f; .reg .u64 o; .reg .u32 x; .reg .u32 i;
    ld.param.u64 p, [to]; ld.global.u32 x, [p]; ld.param.u32 i, [which];
    mul.wide.u32 o, i, 8; mov.u64 f, functions; add.u64 f, f, o; ld.global.u64 f, [f];
    how: .callprototype (.param .u32 _) _ (.param .u32 _);
    {{
        .param .u32 a; .param .u32 r;
        st.param.u32 [a], x; call (r), f, (a), how; ld.param.u32 x, [r];
    }}
    st.global.u32 [p], x; ret;
}}
.visible .entry divides(.param .u64 to) .maxntid 128, 1, 1 .minnctapersm 4
{{
    .reg .u64 p; .reg .u64 x; .reg .u64 y; .reg .u32 z;
    ld.param.u64 p, [to]; ld.global.u64 x, [p]; ld.global.u64 y, [p+8]; ld.global.u32 z, [zero];
    div.u64 x, x, y; st.global.u64 [p], x; st.global.u32 [p+8], z; ret;
}}
"""
KERNELS = ("chooses", "divides", "prints", "shares")
TARGETS = ("sm_80", "sm_90", "sm_90a")


def tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([name, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The kernels for each architecture."""
    folder, out = tmp_path_factory.mktemp("compiled"), {}
    for target in TARGETS:
        (folder / f"{target}.ptx").write_text(PTX.format(target=target))
        tool("ptxas", "-arch", target, "-o", folder / f"{target}.cubin", folder / f"{target}.ptx")
        out[target] = (folder / f"{target}.cubin").read_bytes()
    return out


def complaints(file: Path) -> set[str]:
    """What readelf finds amiss, without numbers."""
    return {re.sub(r"\d+", "N", line) for line in tool("readelf", "-a", "-W", file).stderr.splitlines()}


@pytest.mark.parametrize("target", TARGETS)
def test_any_kernels_of_a_cubin_mean_what_they_meant(compiled: dict[str, bytes], target: str) -> None:
    image = compiled[target]
    before = Meaning.of(image)
    for used in chain.from_iterable(combinations(KERNELS, n) for n in range(1, len(KERNELS))):
        left = stripped(image, used)
        assert Meaning.of(left) == before.without_kernels(set(KERNELS) - set(used)), used
        assert elf.loadable(left) == left == stripped(left, used)
        assert elf.variables(left) == elf.variables(image)
    assert stripped(image, KERNELS) == image
    assert len(stripped(image, ["prints"])) < len(image) / 2


@pytest.mark.parametrize("target", TARGETS)
def test_tools_read_what_is_left_like_what_was(compiled: dict[str, bytes], target: str, tmp_path: Path) -> None:
    (tmp_path / "whole.cubin").write_bytes(compiled[target])
    for kernel in KERNELS:
        (tmp_path / "left.cubin").write_bytes(stripped(compiled[target], [kernel]))
        if shutil.which("readelf"):
            assert complaints(tmp_path / "left.cubin") <= complaints(tmp_path / "whole.cubin")
        if shutil.which("cuobjdump"):
            code = [tool("cuobjdump", "-sass", "-fun", kernel, tmp_path / f"{n}.cubin") for n in ("whole", "left")]
            assert "EXIT" in code[0].stdout
            assert code[0].stdout.split()[2:] == code[1].stdout.split()[2:]


@pytest.mark.skipif(shutil.which("nvlink") is None, reason="nvlink is not there")
@pytest.mark.parametrize("target", TARGETS[:2])
def test_functions_in_sections_of_their_own_stay_and_calls_by_address_are_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "a.ptx").write_text(PTX.format(target=target))
    tool("ptxas", "-c", "-arch", target, "-o", tmp_path / "a.o", tmp_path / "a.ptx")
    tool("nvlink", "-arch", target, "-o", tmp_path / "a.cubin", tmp_path / "a.o")
    image = (tmp_path / "a.cubin").read_bytes()
    assert {".text.square", ".text.more"} <= set(Parts.of(image).names)
    before = Meaning.of(image)
    for kernel in ("divides", "prints", "shares"):
        left = stripped(image, [kernel])
        assert Meaning.of(left) == before.without_kernels(set(KERNELS) - {kernel})
    with pytest.raises(UnreadableImage, match=r"\.text\.chooses calls functions by address"):
        stripped(image, ["chooses"])
