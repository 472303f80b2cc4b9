# SPDX-License-Identifier: Apache-2.0
"""Driver, GPUs, and the communication libraries that an engine would really get."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foundryd.doctor.children import probe
from foundryd.doctor.finding import Finding, Level, Surroundings, size

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
ADVICE = {
    802: "start nvidia-fabricmanager and wait until it is ready",
    803: "load the kernel module of the installed driver: reboot, or reload nvidia after an upgrade",
    804: "use a driver that supports this CUDA, or remove the forward-compatibility libcuda from the library path",
}


def gpus(around: Surroundings) -> list[Finding]:
    """The driver, and each GPU by index, UUID and MIG."""
    probed = probe("driver", around.child_environment(), around.timeout)
    found = probed.value
    if probed.failure:
        fix = "see whether nvidia-smi works, and the kernel's log"
        return [Finding("driver", Level.ERROR, f"a process that calls cuInit failed: {probed.failure}", fix)]
    if "error" in found:
        message = f"there is no CUDA driver ({found['error']}), so no GPU: only the software driver works here"
        fix = "on a GPU node, install NVIDIA's driver, or start the container with --gpus"
        return [Finding("driver", Level.WARNING, message, fix, {"gpus": []})]
    version = _kernel_version(around.root)
    facts = {"cuda": found["cuda"], "paths": found["paths"], "software": found["software"], "kernel": version}
    where = ", ".join(found["paths"])
    if found["init"] == NO_DEVICE or (found["init"] == 0 and not found["devices"]):
        message = f"the driver at {where} sees no GPU"
        visible = around.env.get("CUDA_VISIBLE_DEVICES")
        fix = (
            "correct CUDA_VISIBLE_DEVICES"
            if visible is not None
            else "start the container with --gpus, or use a GPU node"
        )
        return [Finding("driver", Level.WARNING, message, fix, {**facts, "gpus": []})]
    if found["init"] != 0:
        fix = ADVICE.get(found["init"], "see whether nvidia-smi works, and the kernel's log")
        return [Finding("driver", Level.ERROR, f"cuInit at {where} failed with error {found['init']}", fix, facts)]
    what = "the software driver" if found["software"] else f"driver {version or 'of unknown version'}"
    head = Finding("driver", Level.OK, f"{what} with CUDA {found['cuda']} from {where}", "", facts)
    return [head, *(_gpu(device, found["nvml"]) for device in found["devices"]), *_hidden(found, around)]


def _gpu(device: dict[str, Any], nvml: list[dict[str, Any]] | None) -> Finding:
    whole = next((g for g in nvml or [] if g["uuid"] == f"GPU-{device['uuid']}"), None)
    owner = next((g for g in nvml or [] if f"MIG-{device['uuid']}" in g["slices"]), None)
    mig = "slice" if owner is not None else whole["mig"] if whole is not None else "unknown"
    uuid = f"{'MIG' if owner is not None else 'GPU'}-{device['uuid']}"
    text = f"GPU {device['index']}: {device['name']}, {uuid}, {size(device['bytes'])}"
    facts = {**device, "uuid": uuid, "mig": mig}
    if owner is None:
        return Finding("gpu", Level.OK, f"{text}, MIG {mig}" if mig != "unknown" else text, "", facts)
    fix = "capture on such a slice, or switch MIG off"
    why = "an archive of a whole GPU has another number of SMs and is refused here"
    return Finding("gpu", Level.WARNING, f"{text}, a MIG slice of GPU {owner['index']}: {why}", fix, facts)


def _hidden(found: dict[str, Any], around: Surroundings) -> list[Finding]:
    there, seen = found["nvml"] or [], len(found["devices"])
    if len(there) <= seen:
        return []
    visible = around.env.get("CUDA_VISIBLE_DEVICES")
    why = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "CUDA chose so"
    facts = {"machine": [gpu["uuid"] for gpu in there], "visible": seen}
    return [
        Finding("gpu", Level.OK, f"{seen} of {len(there)} GPUs of this machine are visible here ({why})", "", facts)
    ]


def _kernel_version(root: Path) -> str | None:
    from foundryd.session.identity import kernel_driver_version

    return kernel_driver_version(root / "sys/module/nvidia/version")


def libraries(around: Surroundings) -> list[Finding]:
    """NCCL and NVSHMEM: which file, which version, by whom."""
    env = around.child_environment()
    probed = probe("libraries", env, around.timeout)
    if probed.failure:
        message = f"a process that loads NCCL and NVSHMEM failed: {probed.failure}"
        return [Finding("nccl", Level.ERROR, message, "correct LD_LIBRARY_PATH, or install the libraries again")]
    torch: dict[str, Any] = {}
    out: list[Finding] = []
    if find_spec("torch") is not None:
        asked = probe("torch", env, around.timeout)
        torch = asked.value
        failure = asked.failure or torch.get("error", "")
        if failure:
            out.append(Finding("torch", Level.ERROR, f"torch cannot be imported: {failure}", "install torch again"))
            torch = {}
    out.append(_nccl(probed.value["nccl"], torch.get("nccl", {})))
    out.append(_nvshmem(probed.value["nvshmem"], torch.get("nvshmem", {})))
    return out


def _nccl(plain: dict[str, Any], torch: dict[str, Any]) -> Finding:
    facts = {"loader": plain, "torch": torch or None}
    if "error" in plain and not torch.get("paths"):
        message = f"there is no NCCL ({plain['error']}): worlds of more than one rank need one"
        return Finding("nccl", Level.WARNING, message, "pip install 'foundryd[cu13]' or 'foundryd[cu12]'", facts)
    paths = {*plain.get("paths", []), *torch.get("paths", [])}
    stub = next((path for path in sorted(paths) if Path(path).parent.name == "fake"), None)
    if stub is not None:
        message = f"NCCL is the stub for captures, {stub}, which reaches no other rank"
        return Finding("nccl", Level.ERROR, message, "take it out of LD_PRELOAD and LD_LIBRARY_PATH", facts)
    return _described("nccl", "NCCL", plain, torch, facts)


def _nvshmem(plain: dict[str, Any], torch: dict[str, Any]) -> Finding:
    facts = {"loader": plain, "torch": torch or None}
    if "error" in plain and not torch.get("paths"):
        return Finding("nvshmem", Level.OK, "there is no NVSHMEM, which only engines that use it need", "", facts)
    return _described("nvshmem", "NVSHMEM", plain, torch, facts)


def _described(check: str, title: str, plain: dict[str, Any], torch: dict[str, Any], facts: dict[str, Any]) -> Finding:
    """One file is well; two of them in one process, or one for torch and another for the rest, is not."""
    said = [
        (f"from {' and '.join(it['paths'])}", it["version"], how)
        for it, how in ((plain, plain.get("how")), (torch, "torch"))
        if it.get("paths")
    ]
    text = "; ".join(f"{title} {version or 'of unknown version'} {where} ({how})" for where, version, how in said)
    files = {str(Path(path).resolve()) for it in (plain, torch) for path in it.get("paths", [])}
    if len(files) > 1:
        fix = f"keep one of them: the archive's identity names one version of {title}"
        return Finding(check, Level.WARNING, f"{len(files)} files of {title} would be loaded: {text}", fix, facts)
    return Finding(check, Level.OK, text, "", facts)
