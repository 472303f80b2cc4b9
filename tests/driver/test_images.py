# SPDX-License-Identifier: Apache-2.0
"""Images are genuine containers; a damaged one is refused."""

from __future__ import annotations

import struct
from typing import Any

from foundryd import _native


def test_an_image_is_one_container_with_one_entry() -> None:
    data = _native.image("driver_tests").read_bytes()
    magic, version, header, size = struct.unpack_from("<IHHQ", data)
    assert (magic, version, header) == (0xBA55ED50, 1, 16)
    assert header + size == len(data)
    kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, header)
    assert (kind, entry_header, header + entry_header + payload) == (2, 64, len(data))
    assert data[header + entry_header :][:4] == b"\x7fELF"
    assert b".note.gnu.build-id" not in data


def test_every_way_of_loading_takes_it(program: Any) -> None:
    source = """
        start()
        path = _native.image("driver_tests"); data = path.read_bytes()
        elf = ctypes.create_string_buffer(data[80:], len(data) - 80)
        body = ctypes.create_string_buffer(data, len(data))
        wrapper = (ctypes.c_uint64 * 3)(1 << 32 | 0x466243b1, ctypes.addressof(body), 0)
        out = ctypes.c_void_p()
        cuda = library()
        answer([
            code(cu.cuModuleLoadData(data)), code(cu.cuModuleLoadDataEx(data, 0, [], [])),
            code(cu.cuModuleLoad(str(path).encode())), code(cu.cuModuleLoadFatBinary(data)),
            code(cu.cuLibraryLoadFromFile(str(path).encode(), [], [], 0, [], [], 0)),
            cuda.cuModuleLoadData(ctypes.byref(out), elf), cuda.cuModuleLoadFatBinary(ctypes.byref(out), wrapper),
            cuda.cuModuleLoadData(ctypes.byref(out), wrapper),
        ])
    """
    assert program(source) == ["SUCCESS"] * 5 + [0, 0, 0]


def test_damaged_images_are_refused(program: Any) -> None:
    source = """
        start()
        data = bytearray(_native.image("driver_tests").read_bytes())
        def load(at, value, count=1):
            broken = bytearray(data)
            broken[at:at + count] = value.to_bytes(count, "little")
            return code(cu.cuModuleLoadData(bytes(broken)))
        answer({
            "magic": load(0, 0), "version": load(4, 9), "short": load(8, 20, 8), "kind": load(16, 1),
            "architecture": load(16 + 28, 80), "zstd": load(16 + 41, 0x80), "lz4": load(16 + 41, 0x20),
            "entry_short": load(24, 8, 8),
            "not_elf": load(80, 0), "machine": load(80 + 18, 3), "sections": load(80 + 40, 1 << 40, 8),
        })
    """
    assert program(source) == {
        "magic": "INVALID_IMAGE",
        "version": "INVALID_IMAGE",
        "short": "INVALID_IMAGE",
        "kind": "JIT_COMPILER_NOT_FOUND",
        "architecture": "NO_BINARY_FOR_GPU",
        "zstd": "NO_BINARY_FOR_GPU",
        "lz4": "INVALID_IMAGE",
        "entry_short": "INVALID_IMAGE",
        "not_elf": "INVALID_IMAGE",
        "machine": "NO_BINARY_FOR_GPU",
        "sections": "INVALID_IMAGE",
    }


def test_a_short_file_is_refused(program: Any, tmp_path: Any) -> None:
    data = _native.image("driver_tests").read_bytes()
    paths = []
    for size in (0, 3, 16, 90, len(data) // 2, len(data) - 1):
        path = tmp_path / f"{size}.fatbin"
        path.write_bytes(data[:size])
        paths.append(str(path))
    source = """
        start()
        answer([code(cu.cuModuleLoad(path.encode())) for path in sys.argv[1:]])
    """
    assert program(source, *paths) == ["INVALID_IMAGE"] * 6


def test_code_outlives_its_module_in_a_graph(program: Any) -> None:
    """A graph that still names a function of an unloaded module must not bring the process down."""
    source = """
        start(); module = load(); stream = ok(cu.cuStreamCreate(1)); target = int(ok(cu.cuMemAlloc(64)))
        ok(cu.cuMemsetD32(target, 0, 16)); ok(cu.cuCtxSynchronize())
        ok(cu.cuStreamBeginCapture(stream, THREAD)); ok(launch(function(module, "increment"), stream, target))
        executable = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
        ok(cu.cuModuleUnload(module))
        ok(cu.cuGraphLaunch(executable, stream)); ok(cu.cuStreamSynchronize(stream))
        answer(words(target, 1))
    """
    assert program(source) == [1]
