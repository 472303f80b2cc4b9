# SPDX-License-Identifier: Apache-2.0
"""What the library exports, and that look-ups by version give the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from foundryd import _native

TABLE = Path(__file__).resolve().parents[2] / "stubs/cuda/src/exports.inc"
# Found by dlsym alone: what cuda.h's own look-up does not list.
UNLISTED = {"softcuda_counters", "softcuda_set_owner", "softcuda_count_faults", "softcuda_faults"}


def exported() -> set[str]:
    library = _native.find("soft/libcuda.so.1")
    out = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in out.stdout.splitlines()}


def listed() -> set[str]:
    rows = re.findall(r"SOFTCUDA_EXPORT(?:_PER_THREAD)?\(([^)]*)\)", TABLE.read_text())
    return {field.strip() for row in rows for field in row.split(",")[2::2]}


def test_the_library_exports_its_table_and_nothing_else() -> None:
    assert exported() == listed() | UNLISTED


def test_every_row_is_found_by_its_version(program: Any) -> None:
    rows = [
        [field.strip() for field in row.split(",")]
        for row in re.findall(r"SOFTCUDA_EXPORT(?:_PER_THREAD)?\(([^)]*)\)", TABLE.read_text())
    ]
    source = """
        cuda = library()
        def find(name, version, flags):
            out, status = ctypes.c_void_p(), ctypes.c_int()
            assert cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(out), version, ctypes.c_uint64(flags),
                                            ctypes.byref(status)) == 0
            return out.value
        def address(name):
            return ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value
        wrong = []
        for row in json.loads(sys.argv[1]):
            if find(row[0], int(row[1]), 1) != address(row[2]):
                wrong.append(row[2])
            if len(row) > 3 and find(row[0], int(row[3]), 2) != address(row[4]):
                wrong.append(row[4])
        answer(wrong)
    """
    import json

    assert program(source, json.dumps(rows)) == []


def test_the_driver_calls_itself_and_never_a_preloaded_namesake() -> None:
    """Bound at link time, or a preloaded hook would see the driver's own calls."""
    library = _native.find("soft/libcuda.so.1")
    out = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "SYMBOLIC" in out
    assert "soname: [libcuda.so.1]" in out
    relocations = subprocess.run(["readelf", "-rW", str(library)], capture_output=True, text=True, check=True).stdout
    assert not re.findall(r" (cu[A-Z]\w+)", relocations)
