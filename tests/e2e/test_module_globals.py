# SPDX-License-Identifier: Apache-2.0
"""Globals that only device code changes come back with a restore, however the image is packed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from foundryd import _native
from foundryd._native import _rankpatch
from foundryd.archive.format import image_section
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import violations
from foundryd.capture.images import entries
from foundryd.cli.environment import restore_environment

# One rank whose kernels change globals of their module and put the address of one into another, before its graph is
# captured; a restoring process launches none of them.  Says what the replayed graph read.
ENGINE = """
import ctypes, json, sys
from pathlib import Path
from cuda.bindings import driver as cu
import foundryd
from foundryd.demo.device import Device, checked
from foundryd.session.arena import arena

graphs = foundryd.GraphSet.from_env()
device = Device(0)
module = checked(cu.cuModuleLoadData, Path(sys.argv[1]).read_bytes())
kernels = {n: checked(cu.cuModuleGetFunction, module, n.encode()) for n in ("aim", "follow", "touch")}
with arena("io"):
    out = device.allocate((1,), 8)

def launch(name, *pointers):
    values = [ctypes.c_uint64(p) for p in pointers]
    places = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
    checked(cu.cuLaunchKernel, kernels[name], 1, 1, 1, 1, 1, 1, 0, device.stream, ctypes.addressof(places), 0)

if graphs.mode.value != "restore":
    launch("aim")
    for _ in range(40):
        launch("touch")
graph, _ = graphs.capture_or_restore("step", lambda: launch("follow", out), stream=device.stream)
graphs.finish()
graph.replay(device.stream)
print(json.dumps({"restored": graphs.restored, "out": device.read(out, (1,), "<u8").tolist(),
                  "fallback": str(graphs.fallback)}), flush=True)
graphs.close()
"""
VALUE = 42  # of a global that starts as 2

# A kernel of one module is given addresses in another, of which no graph has a kernel.  The second argument says how.
BESIDE = """
import ctypes, json, sys
from pathlib import Path
from cuda.bindings import driver as cu
import foundryd
from foundryd.demo.device import Device, checked
from foundryd.session.arena import arena

graphs = foundryd.GraphSet.from_env()
device = Device(0)
image, how = Path(sys.argv[1]).read_bytes(), sys.argv[2]
restoring = graphs.mode.value == "restore"
if how in ("library", "behind"):
    beside = checked(cu.cuLibraryLoadData, image, [], [], 0, [], [], 0)
    count = checked(cu.cuKernelGetFunction, checked(cu.cuLibraryGetKernel, beside, b"count"))
    if how == "behind":
        counter = int(checked(cu.cuModuleGetGlobal, checked(cu.cuLibraryGetModule, beside), b"counter")[0])
    else:
        counter = int(checked(cu.cuLibraryGetGlobal, beside, b"counter")[0])
else:
    beside = checked(cu.cuModuleLoadData, image)
    count = checked(cu.cuModuleGetFunction, beside, b"count")
    counter = int(checked(cu.cuModuleGetGlobal, beside, b"counter")[0])
module = checked(cu.cuModuleLoadData, image)
join = checked(cu.cuModuleGetFunction, module, b"join")
with arena("io"):
    out, zero, unused = (device.allocate((1,), 8) for _ in range(3))
checked(cu.cuMemsetD8, zero, 0, 8)

def launch(kernel, *pointers):
    values = [ctypes.c_uint64(p) for p in pointers]
    places = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
    checked(cu.cuLaunchKernel, kernel, 1, 1, 1, 1, 1, 1, 0, device.stream, ctypes.addressof(places), 0)

table = device.allocate((2,), 8)  # of the default arena: an archive brings what it holds
checked(cu.cuMemsetD8, table, 0, 16)
if not restoring:
    for _ in range(3):
        launch(count, unused)
    if how in ("read", "unread"):
        checked(cu.cuMemcpyHtoD, table + 8, counter.to_bytes(8, "little"), 8)
    if how == "aimed":
        aimed = int(checked(cu.cuModuleGetGlobal, module, b"aimed")[0])
        checked(cu.cuMemcpyHtoD, aimed, counter.to_bytes(8, "little"), 8)
pointed = {"aimed": zero, "read": table + 8, "unread": zero}.get(how, counter)
graph, _ = graphs.capture_or_restore("step", lambda: launch(join, pointed, zero, out), stream=device.stream)
graphs.finish()
graph.replay(device.stream)
print(json.dumps({"restored": graphs.restored, "out": device.read(out, (1,), "<u8").tolist()}), flush=True)
graphs.close()
"""


def load_builder():
    path = Path(__file__).parents[1] / "capture" / "image_builder.py"
    spec = importlib.util.spec_from_file_location("image_builder", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


IB = load_builder()


def pack(kind: str) -> bytes:
    """The image of the hook's tests in a container."""
    elf = next(e.payload for e in entries(_native.image("hooktest").read_bytes()) if e.architecture == 90)
    if kind == "lz4":
        return IB.container(IB.entry(b"for another", 80), IB.entry(elf, flags=IB.LZ4))
    if kind == "choice":
        return IB.container(IB.entry(b"for another", 80), IB.entry(elf), IB.entry(elf, flags=IB.SPECIFIC | IB.LZ4))
    # Which of two for one architecture is taken, the driver decides, so both have to be known.
    return IB.container(IB.entry(elf), IB.entry(b"unknown code", flags=IB.SPECIFIC))


@pytest.fixture
def engine(e2e, foundryd, tmp_path):
    """Captures the engine with an image; answers how that ended and a function that restores it."""

    def capture(kind, *options, engine=ENGINE, how=""):
        image, archive = tmp_path / f"{kind}.fatbin", tmp_path / f"{kind}.foundry"
        image.write_bytes(pack(kind))
        command = [sys.executable, "-P", "-c", engine, image, how]
        arguments = ["-o", archive, "--variant", "tp=1", "--driver", "soft", *options]
        done = foundryd("capture", *arguments, "--", *command)

        def restore():
            base = e2e.clean_environment()
            env = base | restore_environment(base, archive=str(archive), group="globals", variant="tp=1")
            ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
            assert ran.returncode == 0, ran.stderr
            return json.loads(ran.stdout.splitlines()[-1])

        return done, archive, restore

    return capture


def test_what_device_code_wrote_to_globals_of_a_compressed_image_is_restored(engine, foundryd):
    done, archive, restore = engine("lz4")
    assert done.code == 0, done.err
    assert restore() == {"restored": True, "out": [VALUE], "fallback": "None"}
    with ArchiveReader.open(archive) as reader:
        assert violations(reader, deep=True) == []
        (variant,) = reader.index.variants
        assert [(s.module, s.name) for s in variant.symbols] == [(0, "table")]
        relocations = reader.array(variant.relocations, _rankpatch.relocation_dtype)
        assert relocations[["offset", "addend"]].tolist() == [(8, 4)]
    (module,) = foundryd("inspect", archive, "--json").json["variants"][0]["module_details"]
    assert (module["targets"], module["compression"]) == (["any"], ["none"])  # the host library alone
    assert (module["loaded_bytes"], module["whole_because"]) == (len(pack("lz4")), "")
    assert (module["globals"], module["changed_globals"], module["opaque"]) == (4, ["aimed", "table"], "")


def test_a_choice_between_two_codes_is_left_to_the_driver(engine, foundryd):
    done, archive, restore = engine("choice")
    assert done.code == 0, done.err
    assert restore() == {"restored": True, "out": [VALUE], "fallback": "None"}
    with ArchiveReader.open(archive) as reader:
        (module,) = reader.index.variants[0].modules
        kept = bytes(reader.section(image_section(module.digests[0])))
    assert [(e.target, e.compression) for e in entries(kept)] == [("sm_90", ""), ("sm_90a", "lz4")]
    assert len(kept) < len(pack("choice"))


def test_a_module_whose_globals_cannot_be_listed_is_refused_unless_asked_for(e2e, engine, foundryd):
    done, archive, _ = engine("opaque")
    assert done.code != 0
    assert "--allow-opaque-modules" in done.err
    assert "module 0" in done.err
    assert "with the kernel follow" in done.err
    assert not archive.exists()
    done, archive, restore = engine("opaque", "--allow-opaque-modules")
    assert done.code == 0, done.err
    (module,) = foundryd("inspect", archive, "--json").json["variants"][0]["module_details"]
    assert "its header" in module["opaque"]
    assert restore()["restored"]


@pytest.mark.parametrize("how", ["module", "library", "behind"])
def test_a_global_of_a_module_without_kernels_in_graphs_is_found_and_restored(engine, foundryd, how):
    """The driver may put that module at the same place in every capture, and elsewhere in a restore."""
    done, archive, restore = engine("lz4", engine=BESIDE, how=how)
    assert done.code == 0, done.err
    assert restore() == {"restored": True, "out": [31 * (5 + 3)]}
    with ArchiveReader.open(archive) as reader:
        assert violations(reader, deep=True) == []
        (variant,) = reader.index.variants
        assert [(s.module, s.name) for s in variant.symbols] == [(1, "counter")]
        assert [[g.name for g in m.globals] for m in variant.modules] == [[], ["counter"]]
    assert foundryd("inspect", archive).code == 0


def test_a_global_that_points_into_a_module_that_is_not_archived_is_refused(engine):
    done, archive, _ = engine("lz4", engine=BESIDE, how="aimed")
    assert done.code != 0
    assert "global aimed of module 0 holds the address of global counter" in done.err
    assert not archive.exists()


def test_an_address_in_memory_that_graphs_read_is_refused(engine):
    done, archive, _ = engine("lz4", engine=BESIDE, how="read")
    assert done.code != 0
    assert "byte 8 of allocation 0 of arena default holds the address of global counter on rank 0" in done.err
    assert not archive.exists()
    done, _, restore = engine("lz4", engine=BESIDE, how="unread")
    assert done.code == 0, done.err
    assert restore() == {"restored": True, "out": [0]}
