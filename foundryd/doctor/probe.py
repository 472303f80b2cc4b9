# SPDX-License-Identifier: Apache-2.0
"""Run as ``python -P -m foundryd.doctor.probe PART``: loads what an engine would load, and prints one JSON object.

A process of its own, since a driver or library may hang, crash or print while it is loaded, and stays loaded.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

NO_NVML = 3  # NVML_ERROR_NOT_SUPPORTED
NVSHMEM = "libnvshmem_host.so.3"
NCCL = "libnccl.so.2"


def mapped(stem: str) -> list[str]:
    """Files of this process's mappings whose name begins with ``stem``, as the kernel says."""
    fields = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted({f[5] for f in fields if len(f) > 5 and Path(f[5]).name.startswith(stem)})


def driver() -> dict[str, Any]:
    """The CUDA driver, what it sees, and what NVML sees."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": str(error)}
    out: dict[str, Any] = {"paths": mapped("libcuda.so"), "software": hasattr(cuda, "softcuda_counters")}
    version, count = ctypes.c_int(), ctypes.c_int()
    out["init"] = cuda.cuInit(0)
    if out["init"] == 0:
        cuda.cuDriverGetVersion(ctypes.byref(version))
        out["init"] = cuda.cuDeviceGetCount(ctypes.byref(count))
    out["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    out["devices"] = [_device(cuda, index) for index in range(count.value)]
    out["nvml"] = None if out["software"] else _nvml()
    return out


def _device(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    handle, memory = ctypes.c_int(), ctypes.c_size_t()
    uuid, name = (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(128)
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    cuda.cuDeviceGetName(name, 128, handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or getattr(cuda, "cuDeviceGetUuid", None)
    known = ask is not None and ask(ctypes.byref(uuid), handle) == 0
    return {
        "index": index,
        "name": name.value.decode(errors="replace"),
        "bytes": memory.value,
        "uuid": _uuid(bytes(uuid)) if known else "",
    }


def _uuid(raw: bytes) -> str:
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _nvml() -> list[dict[str, Any]] | None:
    """Every GPU of the machine, visible to CUDA here or not; None where NVML does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    out = []
    for index in range(count.value):
        device, now, later = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        code = nvml.nvmlDeviceGetMigMode(device, ctypes.byref(now), ctypes.byref(later))
        mig = {0: "on" if now.value else "off", NO_NVML: "off"}.get(code, "unknown")
        slices = _slices(nvml, device) if mig == "on" else []
        out.append({"index": index, "uuid": _text(nvml.nvmlDeviceGetUUID, device), "mig": mig, "slices": slices})
    return out


def _slices(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> list[str]:
    most, out = ctypes.c_uint(), []
    nvml.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(most))
    for index in range(most.value):
        part = ctypes.c_void_p()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index, ctypes.byref(part)) == 0:
            out.append(_text(nvml.nvmlDeviceGetUUID, part))
    return out


def _text(ask: Callable[..., int], device: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    return buffer.value.decode() if ask(device, buffer, 96) == 0 else ""


def libraries() -> dict[str, Any]:
    """NCCL and NVSHMEM as the loader finds them by name, or else as NVIDIA's packages bring them."""
    return {
        "nccl": _library(NCCL, "nccl", _nccl_version),
        "nvshmem": _library(NVSHMEM, "nvshmem_host", _nvshmem_version),
    }


def _library(name: str, package: str, version: Callable[[ctypes.CDLL], str]) -> dict[str, Any]:
    how, why = "the loader", ""
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        why = str(error)
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib

            found = load_nvidia_dynamic_lib(package).abs_path
            library = ctypes.CDLL(found or name)
        except Exception:  # the library has a type of its own for each way not to find something
            return {"error": why}
        how = "a Python package"
    return {"paths": mapped(name.split(".")[0] + ".so"), "how": how, "version": version(library)}


def _nccl_version(library: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    if not hasattr(library, "ncclGetVersion") or library.ncclGetVersion(ctypes.byref(number)) != 0:
        return ""
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def _nvshmem_version(library: ctypes.CDLL) -> str:
    if not hasattr(library, "nvshmemx_vendor_get_version_info"):
        return ""
    parts = [ctypes.c_int() for _ in range(3)]
    library.nvshmemx_vendor_get_version_info(*(ctypes.byref(part) for part in parts))
    return ".".join(str(part.value) for part in parts)


def torch() -> dict[str, Any]:
    """What ``import torch`` loads."""
    try:
        import torch as module
    except Exception as error:  # an import may fail with anything
        return {"error": f"{type(error).__name__}: {error}"}
    out: dict[str, Any] = {"version": str(module.__version__)}
    for key, stem, version in (
        ("nccl", "libnccl.so", _nccl_version),
        ("nvshmem", "libnvshmem_host.so", _nvshmem_version),
    ):
        paths = mapped(stem)
        out[key] = {"paths": paths, "version": ""}
        with suppress(OSError):
            out[key]["version"] = version(ctypes.CDLL(paths[0])) if paths else ""
    return out


def maps() -> dict[str, Any]:
    """Which hook is in a process that was started like this one."""
    return {"hook": mapped("libfoundryd_hook.so")}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "driver": driver,
    "libraries": libraries,
    "torch": torch,
    "maps": maps,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]()))
