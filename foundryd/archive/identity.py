# SPDX-License-Identifier: Apache-2.0
"""Whether this machine and process are ones that an archive can be restored on.

A wrong graph is worse than a slow start, so a fact is compared for equality unless its row in ``FACTS`` has a rule
that loosens it *and* the archive marks the field ``compatible``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from foundryd.archive.index import IdentityField
from foundryd.errors import IdentityMismatch, UsageError

Value = str | int | list[str]
Match = Literal["exact", "compatible"]

_GIB = 1 << 30


class Provider(Protocol):
    """Whoever knows facts of the machine or process: the hook's side, an engine adapter."""

    def identity_facts(self) -> Mapping[str, Value]:
        """Facts by the names of ``FACTS``; names of an engine's own are allowed and compared for equality."""


@dataclass(frozen=True)
class Fact:
    """One row of the table of facts.

    Attributes
    ----------
    title : what a person calls it.
    match : how a new archive marks it.
    compatible : (archived, found) -> whether found will do, where the archive says ``compatible``.
    rule : the same in words.
    advice : what to do about a mismatch.
    """

    title: str
    match: Match
    compatible: Callable[[Value, Value], bool]
    rule: str
    advice: str


@dataclass(frozen=True)
class Mismatch:
    """A fact that differs; a side that does not have the fact is None."""

    field: str
    archived: Value | None
    found: Value | None
    match: Match
    why: str
    advice: str

    def __str__(self) -> str:
        archived, found = shown(self.archived), shown(self.found)
        return f"{self.field} is {found} and the archive has {archived} ({self.why}: {self.advice})"


def _numbers(value: Value) -> tuple[int, ...] | None:
    """``580.159.04`` as numbers; None for anything that is not a dotted version."""
    text = str(value) if isinstance(value, str | int) else ""
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"\d{1,9}(\.\d{1,9}){0,5}", text) else None


def _equal(archived: Value, found: Value) -> bool:
    return archived == found


def _not_older(archived: Value, found: Value) -> bool:
    """Same or newer; versions that are not numbers have to be equal."""
    old, new = _numbers(archived), _numbers(found)
    return archived == found if old is None or new is None else new >= old


def _same_leading(count: int) -> Callable[[Value, Value], bool]:
    """Same or newer, the first ``count`` numbers being equal."""

    def rule(archived: Value, found: Value) -> bool:
        old, new = _numbers(archived), _numbers(found)
        if old is None or new is None:
            return archived == found
        return new[:count] == old[:count] and new >= old

    return rule


def _covers(archived: Value, found: Value) -> bool:
    """Everything that was there is there."""
    return isinstance(archived, list) and isinstance(found, list) and set(archived) <= set(found)


_RECAPTURE = "capture again on this machine"

# The one table.  What is not in it is compared for equality.
FACTS: dict[str, Fact] = {
    # Machine code runs on the driver it was built for and on newer ones; what the driver itself compiles or chooses
    # per graph is done again at restore.
    "driver": Fact(
        "NVIDIA driver",
        "compatible",
        _not_older,
        "the same or a newer one",
        "update the driver, or capture again with it",
    ),
    "cuda": Fact(
        "CUDA version of the driver",
        "compatible",
        _same_leading(1),
        "the same major version, the same or newer",
        "use a driver of that CUDA major, or capture again",
    ),
    "compute_capability": Fact(
        "compute capability", "exact", _equal, "equal", "restore on that architecture, or capture again on this one"
    ),
    # Libraries choose kernels and grids by the number of multiprocessors.
    "sm_count": Fact(
        "multiprocessors", "exact", _equal, "equal", "restore on that GPU (no MIG slice), or capture again"
    ),
    # The KV cache, and with it every address behind it, follows from the memory that is free.
    "memory_class": Fact("device memory", "exact", _equal, "equal, in steps of 4 GiB", _RECAPTURE),
    "device_name": Fact("GPU", "exact", _equal, "equal", _RECAPTURE),
    "nccl": Fact(
        "NCCL",
        "exact",
        _same_leading(2),
        "the same major and minor version, the same or newer patch",
        "install that NCCL, or capture again with this one",
    ),
    "nvshmem": Fact("NVSHMEM", "exact", _equal, "equal", "install that NVSHMEM, or capture again with this one"),
    "deepep": Fact("DeepEP", "exact", _equal, "equal", "install that DeepEP, or capture again with this one"),
    "torch": Fact("torch", "exact", _equal, "equal", "install that torch, or capture again with this one"),
    "engine": Fact("engine", "exact", _equal, "equal", "install that engine, or capture again with this one"),
    "plugins": Fact(
        "plug-ins", "exact", _covers, "each plug-in that was there is there", "install those plug-ins, or capture again"
    ),
    "foundryd": Fact(
        "foundryd", "compatible", _same_leading(1), "the same major version, the same or newer", _RECAPTURE
    ),
    "model_config": Fact(
        "model configuration", "exact", _equal, "equal", "load that model, or capture again with this one"
    ),
    "model_layout": Fact(
        "digest of the weights' layout", "exact", _equal, "equal", "load weights of that layout, or capture again"
    ),
    "shapes": Fact("digest of the captured shapes", "exact", _equal, "equal", "use those shapes, or capture again"),
}

_ENV = "env."
_ENV_FACT = Fact("environment variable", "exact", _equal, "equal, unset included", "set it as it was, or capture again")
_VLLM = "vllm."
_VLLM_FACT = Fact("vLLM setting", "exact", _equal, "equal", "start vLLM as it was captured, or capture again")
_OTHER_FACT = Fact("fact", "exact", _equal, "equal", _RECAPTURE)

# Variables that choose algorithms, kernels or memory of a library.
ENVIRONMENT_PREFIXES = (
    "NCCL_",
    "NVSHMEM_",
    "CUBLAS_",
    "CUBLASLT_",
    "CUDNN_",
    "DEEPEP_",
    "DG_",
    "FLASHINFER_",
    "TORCHINDUCTOR_",
    "TRITON_",
)
ENVIRONMENT_NAMES = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_FORCE_PTX_JIT",
        "CUDA_DISABLE_PTX_JIT",
        "NVIDIA_TF32_OVERRIDE",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCH_BLAS_PREFER_CUBLASLT",
        "VLLM_ATTENTION_BACKEND",
        "VLLM_USE_DEEP_GEMM",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "SGLANG_ATTENTION_BACKEND",
    }
)
# Among those prefixes: what only logs, caches, or names places of one node.
ENVIRONMENT_IGNORED = re.compile(
    r"NCCL_(DEBUG.*|COMM_ID|HOSTID|SOCKET_IFNAME|OOB_NET_IFNAME|IB_HCA|CONF_FILE|TOPO_DUMP_FILE|GRAPH_DUMP_FILE|RAS_.*)"
    r"|NVSHMEM_(DEBUG.*|INFO.*|VERSION|BOOTSTRAP.*|HCA_LIST|ENABLE_NIC_PE_MAPPING|HCA_PE_MAPPING)"
    r"|CUBLAS(LT)?_LOG.*|CUDNN_LOG.*|FLASHINFER_(LOG.*|WORKSPACE_BASE)|DG_(JIT_CACHE_DIR|JIT_DEBUG|PRINT_.*)"
    r"|TORCHINDUCTOR_(CACHE_DIR|COMPILE_THREADS|FX_GRAPH_CACHE|AUTOGRAD_CACHE|FX_GRAPH_REMOTE_CACHE)"
    r"|TRITON_(CACHE_DIR|CACHE_AUTOTUNING|PRINT_AUTOTUNING|HOME|DUMP_DIR|KERNEL_DUMP)"
)


@dataclass(frozen=True)
class MachineIdentity:
    """Facts of a machine and process by name; environment variables are ``env.NAME``."""

    fields: dict[str, IdentityField]

    @classmethod
    def of(cls, facts: Mapping[str, Value]) -> MachineIdentity:
        """Marks each fact as the table says."""
        return cls({name: IdentityField(facts[name], fact(name).match) for name in sorted(facts)})

    @classmethod
    def collect(cls, providers: Iterable[Provider], environ: Mapping[str, str] | None = None) -> MachineIdentity:
        """Asks every provider and reads the environment; raises ``UsageError`` if two providers disagree."""
        facts: dict[str, Value] = {}
        for provider in providers:
            for name, value in provider.identity_facts().items():
                if facts.setdefault(name, value) != value:
                    raise UsageError(
                        f"the fact {name} is {shown(facts[name])} to one provider and {shown(value)} to another: "
                        "make "
                        "only one of them answer"
                    )
        return cls.of(facts | environment_facts(os.environ if environ is None else environ))

    @classmethod
    def load(cls, path: Path | str) -> MachineIdentity:
        """Reads a JSON object of facts, as ``to_json`` writes it; raises ``UsageError``."""
        try:
            facts = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, str | int | list[str]])
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(
                f"{path} is not a JSON object of facts ({error}): write {{name: text, number or list of texts}}"
            ) from error
        return cls.of(facts)

    def to_json(self) -> str:
        """The facts as one JSON object."""
        return json.dumps({name: field.value for name, field in self.fields.items()}, indent=2, sort_keys=True)


def fact(name: str) -> Fact:
    """The row of the table for a field's name."""
    if name.startswith(_ENV):
        return _ENV_FACT
    return _VLLM_FACT if name.startswith(_VLLM) else FACTS.get(name, _OTHER_FACT)


def environment_facts(environ: Mapping[str, str]) -> dict[str, Value]:
    """The variables that choose kernels, algorithms or memory, as ``env.NAME``."""
    return {
        _ENV + name: value
        for name, value in sorted(environ.items())
        if (name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES)
        and not ENVIRONMENT_IGNORED.fullmatch(name)
    }


def memory_class(total_bytes: int) -> str:
    """A device's memory in steps of 4 GiB: what the driver keeps for itself varies by tens of MiB."""
    return f"{round(total_bytes / (4 * _GIB)) * 4} GiB"


def compare(archived: Mapping[str, IdentityField], machine: MachineIdentity) -> list[Mismatch]:
    """Every fact of the archive that the machine does not meet, in order of names.

    A variable that is set here and was not there is a mismatch too; other facts that only the machine has are not.
    """
    names = sorted(archived.keys() | {name for name in machine.fields if name.startswith(_ENV)})
    found = (_compare(name, archived.get(name), machine.fields.get(name)) for name in names)
    return [mismatch for mismatch in found if mismatch is not None]


def check(archived: Mapping[str, IdentityField], machine: MachineIdentity, archive: str = "the archive") -> None:
    """Raises ``IdentityMismatch`` naming every field that does not match, with both values."""
    mismatches = compare(archived, machine)
    if mismatches:
        raise IdentityMismatch(
            f"{archive} cannot be restored here: " + "; ".join(str(mismatch) for mismatch in mismatches)
        )


def _compare(name: str, archived: IdentityField | None, found: IdentityField | None) -> Mismatch | None:
    row = fact(name)
    match: Match = "exact" if archived is None else archived.match
    old = None if archived is None else archived.value
    new = None if found is None else found.value
    if old == new and type(old) is type(new):
        return None
    if old is not None and new is not None:
        if match == "compatible" and row.compatible(old, new):
            return None
        needed = row.rule if match == "compatible" else "equal"
        why = f"the {row.title} has to be {needed}" if needed != "equal" else f"the {row.title} has to be the same"
    elif name.startswith(_ENV):
        why = "an environment variable that chooses kernels has to be the same, unset included"
    else:
        why = f"the {row.title} of this machine is not known"
    return Mismatch(name, old, new, match, why, row.advice)


def shown(value: Value | None) -> str:
    """A fact's value for a person."""
    if value is None:
        return "not set"
    return ", ".join(value) if isinstance(value, list) else str(value)
