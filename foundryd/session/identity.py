# SPDX-License-Identifier: Apache-2.0
"""What this process would run on, asked of the driver without creating a context."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cuda.bindings import driver

import foundryd
from foundryd.archive.identity import MachineIdentity, Provider, Value, memory_class
from foundryd.errors import DriverCallFailed
from foundryd.session.driver import call


class ProcessFacts:
    """Facts of a rank's device and of the libraries in this process (a ``Provider`` of ``archive.identity``)."""

    def __init__(self, local_rank: int = 0) -> None:
        self._local_rank = local_rank

    def identity_facts(self) -> Mapping[str, Value]:
        """Facts by the names of ``archive.identity.FACTS``; raises ``DriverCallFailed``."""
        call("cuInit", 0)
        # Under capture one device stands for every local rank.
        handle = call("cuDeviceGet", self._local_rank % max(1, int(call("cuDeviceGetCount"))))

        def ask(name: str) -> int:
            attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(call("cuDeviceGetAttribute", attribute, handle))

        cuda = int(call("cuDriverGetVersion"))
        facts: dict[str, Value] = {
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "device_name": call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode(),
            "compute_capability": f"{ask('COMPUTE_CAPABILITY_MAJOR')}.{ask('COMPUTE_CAPABILITY_MINOR')}",
            "sm_count": ask("MULTIPROCESSOR_COUNT"),
            "memory_class": memory_class(int(call("cuDeviceTotalMem", handle))),
            "foundryd": foundryd.__version__,
        }
        optional = {"driver": kernel_driver_version(), "nccl": nccl_version()}
        return facts | {name: value for name, value in optional.items() if value is not None}


def machine_identity(providers: Sequence[Provider] = (), *, local_rank: int = 0) -> MachineIdentity:
    """Identity of this process on its device, with what ``providers`` add; raises ``DriverCallFailed``."""
    return MachineIdentity.collect([ProcessFacts(local_rank), *providers])


def kernel_driver_version(path: Path = Path("/sys/module/nvidia/version")) -> str | None:
    """Version of the NVIDIA kernel module, ``580.159.04``; None where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return text if re.fullmatch(r"[\d.]+", text) else None


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
