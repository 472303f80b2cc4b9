# SPDX-License-Identifier: Apache-2.0
"""Images are genuine containers; a damaged one is refused."""

from __future__ import annotations

import struct
from typing import Any

from foundryd import _native


def test_an_image_is_one_container_with_code_for_several_architectures() -> None:
    data = _native.image("driver_tests").read_bytes()
    magic, version, header, size = struct.unpack_from("<IHHQ", data)
    assert (magic, version, header) == (0xBA55ED50, 1, 16)
    assert header + size == len(data)
    found, at = {}, header
    while at < len(data):
        kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, at)
        assert (kind, entry_header) == (2, 64)
        found[struct.unpack_from("<I", data, at + 28)[0]] = data[at + entry_header :][:payload]
        at += entry_header + payload
    assert at == len(data)
    assert list(found) == [80, 90, 100]
    assert found[90][:4] == b"\x7fELF"
    assert found[80] == found[100] != found[90]
    assert b".note.gnu.build-id" not in found[90]


def own_entry(data: bytes) -> tuple[int, int]:
    """Where the header of the entry for the software driver is, and where its code ends."""
    at = 16
    while True:
        size = struct.unpack_from("<Q", data, at + 8)[0]
        if struct.unpack_from("<I", data, at + 28)[0] == 90:
            return at, at + 64 + size
        at += 64 + size


def test_every_way_of_loading_takes_it(program: Any) -> None:
    source = """
        start()
        path = _native.image("driver_tests"); data = path.read_bytes()
        start, end = int(sys.argv[1]) + 64, int(sys.argv[2])
        elf = ctypes.create_string_buffer(data[start:end], end - start)
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
    places = own_entry(_native.image("driver_tests").read_bytes())
    assert program(source, *map(str, places)) == ["SUCCESS"] * 5 + [0, 0, 0]


def test_damaged_images_are_refused(program: Any) -> None:
    source = """
        start()
        data = bytearray(_native.image("driver_tests").read_bytes())
        own = int(sys.argv[1])
        def load(at, value, count=1):
            broken = bytearray(data)
            broken[at:at + count] = value.to_bytes(count, "little")
            return code(cu.cuModuleLoadData(bytes(broken)))
        answer({
            "magic": load(0, 0), "version": load(4, 9), "short": load(8, 20, 8), "kind": load(own, 1),
            "architecture": load(own + 28, 80), "zstd": load(own + 41, 0x80), "lz4": load(own + 41, 0x20),
            "entry_short": load(own + 8, 8, 8),
            "not_elf": load(own + 64, 0), "machine": load(own + 64 + 18, 3),
            "sections": load(own + 64 + 40, 1 << 40, 8),
        })
    """
    assert program(source, str(own_entry(_native.image("driver_tests").read_bytes())[0])) == {
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
