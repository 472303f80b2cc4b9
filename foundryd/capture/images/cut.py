# SPDX-License-Identifier: Apache-2.0
"""A cubin with only the beginning of the kernels that are not used.

A driver that loads a module reads the code of all its kernels, so most of a load goes into kernels that nobody
launches.  Their sections, symbols and everything else stay: only the code becomes short.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from foundryd.capture.images import elf
from foundryd.capture.images.kernels import Program, program, reached
from foundryd.capture.images.layout import rewritten

LEFT = 128
"""Bytes that stay of a kernel: a whole number of instructions, and the alignment of code."""


def without_unused(cubin: bytes, used: Collection[str]) -> bytes:
    """The cubin with all but the first bytes of every kernel cut off that is not used; itself if nothing can be cut.

    Kernels that anything refers to stay whole, be it a relocation, a call or an address that is taken.  So do those
    with relocations in their code: cut short, these would point behind it, and without them the loader would see
    kernels that no compiler made.
    Raises ``UnreadableImage``, saying why it is not known what may be cut.
    """
    code = program(cubin, used)
    sections = code.file.sections
    kept = _kept(code, {i for i, name in code.kernels.items() if name not in used})
    cut = [i for i in code.kernels if i not in kept and sections[i].size > LEFT]
    if not cut:
        return cubin
    left = {i: code.content(i)[:LEFT] for i in cut}
    return rewritten(code.data, code.file, left | {code.table: _symbols(code, left)})


def _kept(code: Program, unused: set[int]) -> set[int]:
    """The sections that have to stay as they are, of kernels that are not used as well."""
    relocated, referred = set(), set()
    for into, to in code.relocations():
        relocated.add(into)
        referred |= {to} - {into}
    graph = code.graph()
    needed = reached(set(range(len(code.file.sections))) - unused | referred | graph.taken, graph.calls)
    code.check_calls(graph, needed)
    return reached(needed | relocated, graph.calls)


def _symbols(code: Program, left: Mapping[int, bytes]) -> bytes:
    """The symbols, none larger than the code that is left."""
    out = bytearray(code.content(code.table))
    for at in range(0, len(out), elf.SYMBOL.size):
        *head, where, value, length = elf.SYMBOL.unpack_from(out, at)
        if where in left:
            # Functions within a kernel stay where they were, behind its end: nothing but its own code calls them.
            elf.SYMBOL.pack_into(out, at, *head, where, value, min(length, len(left[where])))
    return bytes(out)
