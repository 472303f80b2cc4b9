# SPDX-License-Identifier: Apache-2.0
"""An archive is restored only where each of its facts holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foundryd.archive.identity import (
    FACTS,
    MachineIdentity,
    check,
    compare,
    environment_facts,
    memory_class,
)
from foundryd.archive.index import IdentityField
from foundryd.errors import IdentityMismatch, UsageError

MACHINE = {
    "driver": "580.159.04",
    "cuda": "13.0",
    "compute_capability": "9.0",
    "sm_count": 132,
    "memory_class": "140 GiB",
    "device_name": "NVIDIA H200",
    "nccl": "2.28.9",
    "torch": "2.11.0+cu130",
    "engine": "vllm 0.22.1",
    "plugins": ["a", "b"],
    "model_layout": "c0ffee",
    "env.NCCL_ALGO": "Ring",
}


def differing(change: dict[str, Any], match: str | None = None) -> list[str]:
    archived = MachineIdentity.of(MACHINE).fields
    if match is not None:
        archived = {name: IdentityField(field.value, match) for name, field in archived.items()}
    return [mismatch.field for mismatch in compare(archived, MachineIdentity.of(MACHINE | change))]


def test_a_machine_matches_itself() -> None:
    assert differing({}) == []
    check(MachineIdentity.of(MACHINE).fields, MachineIdentity.of(MACHINE))


@pytest.mark.parametrize("name", sorted(MACHINE))
def test_every_fact_is_compared(name: str) -> None:
    other = {"sm_count": 78, "plugins": ["a"], "driver": "570.1", "cuda": "12.9"}.get(name, "another")
    assert differing({name: other}, "exact") == [name]
    assert differing({name: other}) == [name]


@pytest.mark.parametrize(
    ("name", "value", "will_do"),
    [
        ("driver", "580.159.05", True),
        ("driver", "610.1", True),
        ("driver", "580.99.04", False),
        ("driver", "580", False),
        ("driver", "soft", False),
        ("cuda", "13.2", True),
        ("cuda", "14.0", False),
        ("cuda", "12.9", False),
        ("compute_capability", "10.0", False),
        ("compute_capability", "9.1", False),
        ("sm_count", 148, False),
        ("sm_count", "132", False),
        ("memory_class", "144 GiB", False),
        ("nccl", "2.28.12", True),
        ("nccl", "2.28.3", False),
        ("nccl", "2.29.1", False),
        ("torch", "2.11.1", False),
        ("plugins", ["a", "b", "c"], True),
        ("plugins", ["b", "a"], True),
        ("plugins", ["a"], False),
        ("plugins", "a", False),
        ("model_layout", "c0ffef", False),
        ("env.NCCL_ALGO", "Tree", False),
    ],
)
def test_compatible_has_a_rule_for_each_fact(name: str, value: Any, will_do: bool) -> None:
    assert differing({name: value}, "compatible") == ([] if will_do else [name])
    assert differing({name: value}, "exact") == [name]


def test_only_driver_cuda_and_foundryd_are_compatible_unless_said() -> None:
    assert {name for name, row in FACTS.items() if row.match == "compatible"} == {"driver", "cuda", "foundryd"}


def test_a_fact_the_machine_lacks_is_a_mismatch() -> None:
    machine = {name: value for name, value in MACHINE.items() if name not in ("nccl", "env.NCCL_ALGO")}
    mismatches = compare(MachineIdentity.of(MACHINE).fields, MachineIdentity.of(machine))
    assert [(m.field, m.found) for m in mismatches] == [("env.NCCL_ALGO", None), ("nccl", None)]


def test_a_variable_that_is_only_set_here_is_a_mismatch_and_other_facts_are_not() -> None:
    assert differing({"env.NVSHMEM_IBGDA_SUPPORT": "1"}) == ["env.NVSHMEM_IBGDA_SUPPORT"]
    assert differing({"deepep": "1.2"}) == []


def test_the_error_names_every_fact_with_both_values_and_what_to_do() -> None:
    archived = MachineIdentity.of(MACHINE).fields
    machine = MachineIdentity.of(MACHINE | {"nccl": "2.27.3", "sm_count": 78, "env.NCCL_PROTO": "LL"})
    with pytest.raises(IdentityMismatch) as caught:
        check(archived, machine, "model.foundry")
    text = str(caught.value)
    assert text.startswith("model.foundry cannot be restored here: ")
    for part in ("nccl is 2.27.3 and the archive has 2.28.9", "sm_count is 78 and the archive has 132"):
        assert part in text
    assert "env.NCCL_PROTO is LL and the archive has not set" in text
    assert text.count("capture again") == 3
    assert "\n" not in text


def test_the_environment_keeps_what_chooses_and_drops_what_logs() -> None:
    kept = {"NCCL_ALGO": "Ring", "NVSHMEM_SYMMETRIC_SIZE": "1G", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    dropped = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": "x",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "eth0",
        "TRITON_CACHE_DIR": "/cache",
        "RANK": "3",
        "HOME": "/root",
    }
    assert environment_facts(kept | dropped) == {f"env.{name}": value for name, value in kept.items()}


def test_facts_are_collected_from_providers_and_environment() -> None:
    class Gpu:
        def identity_facts(self) -> dict[str, Any]:
            return {"driver": "580.1", "sm_count": 132}

    class Engine:
        def identity_facts(self) -> dict[str, Any]:
            return {"engine": "demo 1", "sm_count": 132}

    class Liar:
        def identity_facts(self) -> dict[str, Any]:
            return {"sm_count": 1}

    machine = MachineIdentity.collect([Gpu(), Engine()], {"NCCL_ALGO": "Tree", "PATH": "/bin"})
    assert {name: field.value for name, field in machine.fields.items()} == {
        "driver": "580.1",
        "sm_count": 132,
        "engine": "demo 1",
        "env.NCCL_ALGO": "Tree",
    }
    assert machine.fields["driver"].match == "compatible"
    assert machine.fields["sm_count"].match == "exact"
    with pytest.raises(UsageError, match="sm_count is 132 to one provider and 1 to another"):
        MachineIdentity.collect([Gpu(), Liar()], {})


def test_machine_files_round_trip_and_bad_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(MachineIdentity.of(MACHINE).to_json())
    assert MachineIdentity.load(path) == MachineIdentity.of(MACHINE)
    for text in ("", "[]", "{", json.dumps({"driver": 1.5}), json.dumps({"driver": {}}), "[" * 5000):
        path.write_text(text)
        with pytest.raises(UsageError, match="is not a JSON object of facts"):
            MachineIdentity.load(path)
    with pytest.raises(UsageError, match="No such file"):
        MachineIdentity.load(tmp_path / "none.json")


def test_memory_classes_do_not_follow_the_driver_s_own_use() -> None:
    h200 = 143771 << 20
    assert {memory_class(h200 + change) for change in (-(200 << 20), 0, 200 << 20)} == {"140 GiB"}
    assert memory_class(81559 << 20) == "80 GiB"
