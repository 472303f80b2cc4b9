# SPDX-License-Identifier: Apache-2.0
"""The bindings: dtypes for everybody, the hook for whoever has it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from foundryd import errors
from foundryd._native import _hook

# What hook/include/foundryd/records.h says, in bytes.
SIZES = {
    "allocation_dtype": 32,
    "range_dtype": 16,
    "divergence_dtype": 32,
    "window_dtype": 32,
    "module_dtype": 32,
    "function_dtype": 32,
    "field_dtype": 8,
    "setting_dtype": 8,
    "global_dtype": 24,
    "node_dtype": 64,
    "edge_dtype": 16,
    "attribute_dtype": 72,
    "communicator_dtype": 40,
    "comm_op_dtype": 48,
    "counters_dtype": 48,
}


@pytest.mark.parametrize("name", SIZES)
def test_dtypes_are_the_structs_without_holes(name: str) -> None:
    dtype = getattr(_hook, name)
    assert dtype.itemsize == SIZES[name]
    assert sum(dtype[field].itemsize for field in dtype.names) == dtype.itemsize


def test_arrays_inside_structs_are_subarrays() -> None:
    nodes = np.zeros(2, _hook.node_dtype)
    nodes["grid"][1] = (4, 5, 6)
    assert nodes["grid"].shape == (2, 3)
    assert nodes[1].tobytes()[8:20] == np.array([4, 5, 6], np.uint32).tobytes()
    assert np.zeros(1, _hook.attribute_dtype)["value"].shape == (1, 64)


def test_import_needs_neither_hook_nor_driver() -> None:
    source = """
        import ctypes, sys
        from foundryd._native import _hook
        from foundryd.errors import HookMissing
        assert not _hook.available()
        assert "libcuda" not in open("/proc/self/maps").read()
        try:
            _hook.Hook()
        except HookMissing as error:
            print(error)
    """
    lines = "\n".join(line.strip() if not line.startswith(" " * 12) else line[8:] for line in source.splitlines())
    done = subprocess.run([sys.executable, "-P", "-c", lines], capture_output=True, text=True, timeout=60, check=True)
    assert "LD_PRELOAD" in done.stdout


def test_a_wrong_dtype_is_a_wrong_call_not_a_conversion() -> None:
    nodes = np.zeros(1, _hook.node_dtype)
    edges = np.zeros(0, _hook.edge_dtype)
    attributes = np.zeros(0, _hook.attribute_dtype)
    params = np.zeros(0, np.uint8)
    with pytest.raises(errors.UsageError, match="nodes"):
        _hook.GraphArrays(np.zeros(1, np.uint32), edges, attributes, params)
    with pytest.raises(errors.UsageError, match="params"):
        _hook.GraphArrays(nodes, edges, attributes, np.zeros(4, np.int32))
    with pytest.raises(errors.UsageError, match="edges"):
        _hook.GraphArrays(nodes, nodes, attributes, params)


def test_graph_arrays_keep_what_they_were_given() -> None:
    nodes = np.zeros(3, _hook.node_dtype)[::2]  # not contiguous
    nodes["type"] = [3, 1]
    child = _hook.GraphArrays(
        nodes, np.zeros(0, _hook.edge_dtype), np.zeros(0, _hook.attribute_dtype), np.zeros(0, np.uint8)
    )
    parent = _hook.GraphArrays(child.nodes, child.edges, child.attributes, child.params, [child])
    assert parent.children[0].nodes["type"].tolist() == [3, 1]
    assert parent.nodes.dtype == _hook.node_dtype


def test_failures_carry_status_code_and_call(hooked: object) -> None:
    found = hooked.python(  # type: ignore[attr-defined]
        """
        from fdyhook import answer
        from foundryd._native import _hook
        hook = _hook.Hook()
        try:
            hook.module_image(7)
        except Exception as error:
            answer([type(error).__name__, error.status, error.code, error.call, str(error)])
        """,
        "capture",
    )
    assert found[:4] == ["UsageError", 3, 0, ""]
    assert "module 7" in found[4]
