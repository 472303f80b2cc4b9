# SPDX-License-Identifier: Apache-2.0
"""What this process would run on, asked of the driver without creating a context."""

from __future__ import annotations

import ctypes
import os

from cuda.bindings import driver

from foundryd.archive.index import IdentityField
from foundryd.errors import DriverCallFailed
from foundryd.session.driver import call

# Variables that choose kernels or communication algorithms.
_PREFIXES = ("NCCL_", "NVSHMEM_", "CUBLAS_", "TORCH_ALLOW_TF32", "NVIDIA_TF32_OVERRIDE")
# Where a process finds its peers, and how much it says: they choose nothing.
_IGNORED = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_COMM_ID", "NCCL_SOCKET_IFNAME", "NCCL_HOSTID")


def machine_identity(device: int = 0) -> dict[str, IdentityField]:
    """Identity of device ``device`` and of the libraries in this process; raises ``DriverCallFailed``."""
    call("cuInit", 0)
    handle = call("cuDeviceGet", device)
    attribute = driver.CUdevice_attribute

    def ask(name: str) -> int:
        return int(call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle))

    major, minor = ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")
    fields = {
        "cuda_driver": IdentityField(int(call("cuDriverGetVersion"))),
        "device_name": IdentityField(call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode()),
        "compute_capability": IdentityField(f"{major}.{minor}"),
        "sm_count": IdentityField(ask("MULTIPROCESSOR_COUNT")),
        "memory_bytes": IdentityField(int(call("cuDeviceTotalMem", handle)) >> 30 << 30, "compatible"),
        "environment": IdentityField(
            sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_PREFIXES) and k not in _IGNORED)
        ),
    }
    version = nccl_version()
    if version is not None:
        fields["nccl"] = IdentityField(version)
    return fields


def nccl_version() -> str | None:
    """Version of the NCCL that this process would use, ``2.28.9``; None if there is none."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    version = ctypes.c_int()
    code = library.ncclGetVersion(ctypes.byref(version))
    if code != 0:
        raise DriverCallFailed(f"ncclGetVersion failed with {code}: look at which libnccl.so.2 is loaded")
    number = version.value
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
