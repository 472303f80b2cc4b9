# SPDX-License-Identifier: Apache-2.0
"""A module is recorded only if every global of the code that the driver took was compared with a fresh load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundryd._native import _hook, _rankpatch
from foundryd.archive.index import IdentityField, Symbol
from foundryd.capture.images import CUTS, without_unused
from foundryd.capture.modules import GlobalRange, RecordedModules, WholeImage, record_modules
from foundryd.capture.recording import ModuleRecord
from foundryd.capture.symbols import Symbols
from foundryd.errors import OpaqueModule
from foundryd.settings import Settings

sys.path.insert(0, str(Path(__file__).parent))
import image_builder as ib

IDENTITY = {"compute_capability": IdentityField("9.0")}


class Driver:
    """What the hook says of one module whose globals lie behind each other, 8 bytes each."""

    def __init__(self, image: bytes, known: list[str], changed: list[str], *differences: str) -> None:
        """``differences`` are the answers to comparisons; there is none beyond."""
        self._image, self._known, self._changed = image, known, changed
        self._differences = list(differences)
        self.compared: list[tuple[bytes, list[str], list[str]]] = []

    def modules(self) -> Any:
        out = np.zeros(1, _hook.module_dtype)
        out["id"] = 3
        return out

    def module_image(self, module: int) -> bytes:
        return self._image

    def module_globals(self, module: int, names: list[str]) -> Any:
        found = [n for n in self._known if n in names]
        out = np.zeros(len(found), _hook.global_dtype)
        out["address"] = [0x1000 + 8 * self._known.index(n) for n in found]
        out["bytes"] = 8
        return out, found

    def changed_globals(self, module: int, names: list[str]) -> Any:
        rows, found = self.module_globals(module, names)
        places = [i for i, n in enumerate(found) if n in self._changed]
        return rows[places], [found[i] for i in places]

    def image_difference(self, module: int, image: bytes, functions: list[str], names: list[str]) -> str:
        self.compared.append((image, functions, names))
        return self._differences.pop(0) if self._differences else ""

    def download(self, address: int, size: int) -> Any:
        return np.arange(size, dtype=np.uint8)


def image(*names: str, kernels: tuple[str, ...] = ("kernel", "other")) -> bytes:
    return ib.Cubin(
        {ib.CUINFO: (32, 4), ".nv.global": (8 * len(names), 8)} | {f".text.{k}": (512, 128) for k in kernels},
        [ib.Symbol(n, ".nv.global", 8 * i, 8) for i, n in enumerate(names)] + [ib.kernel(k, 512) for k in kernels],
        segments=True,
    ).build()


def record(driver: Driver, allow: bool = False, cut: str = "stripped", **environment: str) -> RecordedModules:
    identity = IDENTITY | {f"env.{name}": IdentityField(value) for name, value in environment.items()}
    users = {3: ["kernel", "other"]}
    return record_modules(driver, {3: 0}, users, identity, allow_opaque=allow, cut=cut)  # type: ignore[arg-type]


def test_what_changed_is_recorded_and_everything_has_a_place() -> None:
    out = record(Driver(image("a", "b"), ["a", "b"], ["b"]))
    assert [name for name, _ in out.records[0].globals] == ["b"]
    assert [(r.address, r.symbol.name) for r in out.ranges] == [(0x1000, "a"), (0x1008, "b")]
    assert out.opaque == {}


def test_a_global_that_the_driver_does_not_find_makes_its_module_opaque() -> None:
    driver = Driver(image("a", "hidden"), ["a"], ["a"])
    with pytest.raises(OpaqueModule, match=r"kernel kernel.*does not find its global hidden.*--allow-opaque-modules"):
        record(driver)
    out = record(driver, allow=True)
    assert out.opaque == {0: "the driver does not find its global hidden"}
    assert [name for name, _ in out.records[0].globals] == ["a"]


def test_of_two_codes_that_the_driver_may_have_taken_one_has_to_be_known_whole() -> None:
    packed = ib.container(ib.entry(image("a", "plain")), ib.entry(image("a", "special"), flags=ib.SPECIFIC | ib.ZSTD))
    for known in (["a", "plain"], ["a", "special"]):
        assert record(Driver(packed, known, ["a"])).opaque == {}
    with pytest.raises(OpaqueModule, match="does not find its global plain"):
        record(Driver(packed, ["a"], []))


def test_addresses_of_code_in_a_changed_global_are_not_archived() -> None:
    code = ib.Cubin(
        {".nv.global.init": (8, 8), ".text.k": (128, 128)},
        [ib.Symbol("table", ".nv.global.init", 0, 8), ib.Symbol("k", ".text.k", 0, 128, ib.FUNCTION, 1)],
        {".nv.global.init": [(0, 1)]},
    ).build()
    assert record(Driver(code, ["table"], [])).opaque == {}
    with pytest.raises(OpaqueModule, match="its global table holds addresses of code"):
        record(Driver(code, ["table"], ["table"]))


PACKED = ib.container(ib.entry(image("old"), 80), ib.entry(image("a"), flags=ib.LZ4))


def test_what_the_device_takes_is_recorded_once_the_driver_says_that_it_is_the_same() -> None:
    driver = Driver(PACKED, ["a"], ["a"])
    out = record(driver)
    assert [m.image for m in out.records] == [image("a")]
    assert out.images == [WholeImage(len(PACKED), "")]
    assert driver.compared == [(image("a"), ["kernel", "other"], ["a"])]


def test_an_image_that_the_driver_tells_from_what_is_left_of_it_stays_whole() -> None:
    out = record(Driver(PACKED, ["a"], [], "has no function other"))
    assert [m.image for m in out.records] == [PACKED]
    assert out.images == [WholeImage(len(PACKED), "without the code for other devices it has no function other")]


MANY = image("a", kernels=("kernel", "idle", "other", "spare"))
LEFT = {cut.name: cut.apply(MANY, ["kernel", "other"]) for cut in CUTS}
PACKED_MANY = ib.container(ib.entry(image("old"), 80), ib.entry(MANY, flags=ib.LZ4))


@pytest.mark.parametrize("loaded", [MANY, PACKED_MANY])
def test_kernels_that_are_not_used_are_not_recorded_once_the_driver_says_that_it_is_the_same(loaded: bytes) -> None:
    driver = Driver(loaded, ["a"], ["a"])
    out = record(driver)
    assert list(LEFT) == ["stripped", "cut"]
    assert len(LEFT["stripped"]) < len(LEFT["cut"]) == len(MANY) - 2 * (512 - 128)
    assert [m.image for m in out.records] == [LEFT["stripped"]]
    assert out.images == [WholeImage(len(loaded), "", len(MANY) - len(LEFT["stripped"]), "", "stripped")]
    assert driver.compared == [(LEFT["stripped"], ["kernel", "other"], ["a"])]


def test_what_is_left_in_an_image_is_the_least_that_the_driver_does_not_tell_from_it() -> None:
    unstripped = "without its other kernels it has no function other"
    uncut = f"{unstripped}; without the code of its other kernels it is not loaded"
    for loaded, differences, kept, cut, uncut_because, because in [
        (MANY, ["has no function other"], LEFT["cut"], "cut", unstripped, ""),
        (PACKED_MANY, ["has no function other"], LEFT["cut"], "cut", unstripped, ""),
        (MANY, ["has no function other", "is not loaded"], MANY, "", uncut, ""),
        (PACKED_MANY, ["has no function other", "is not loaded"], MANY, "", uncut, ""),
        (
            PACKED_MANY,
            ["has no function other", "is not loaded", "has no global a"],
            PACKED_MANY,
            "",
            uncut,
            "without the code for other devices it has no global a",
        ),
    ]:
        driver = Driver(loaded, ["a"], [], *differences)
        out = record(driver)
        assert [m.image for m in out.records] == [kept]
        cut_bytes = len(MANY) - len(kept) if cut else 0
        assert out.images == [WholeImage(len(loaded), because, cut_bytes, uncut_because, cut)]
        tried = [*LEFT.values(), MANY]
        assert [image for image, _, _ in driver.compared] == tried[: len(driver.compared)]


@pytest.mark.parametrize(("most", "left"), [(Settings.cut, LEFT["stripped"]), ("cut", LEFT["cut"]), ("none", MANY)])
def test_no_more_is_left_out_than_was_asked_for(most: str, left: bytes) -> None:
    driver = Driver(MANY, ["a"], [])
    out = record(driver, cut=most)
    assert [m.image for m in out.records] == [left]
    assert [image for image, _, _ in driver.compared] == [left][: most != "none"]
    assert out.images[0].uncut_because == ""


def test_an_image_that_cannot_be_stripped_is_cut_and_says_why() -> None:
    other_rules = MANY[:7] + b"\x40" + MANY[8:]
    driver = Driver(other_rules, ["a"], [])
    out = record(driver)
    left = without_unused(other_rules, ["kernel", "other"])
    assert [image for image, _, _ in driver.compared] == [m.image for m in out.records] == [left]
    reason = "its ABI is 0x40, version 8, which is not known"
    assert out.images == [WholeImage(len(MANY), "", len(MANY) - len(left), reason, "cut")]


def test_an_image_whose_kernels_are_not_known_is_not_cut_and_says_why() -> None:
    odd = image("a", kernels=("kernel", "idle"))
    out = record(driver := Driver(odd, ["a"], []))
    assert out.images == [WholeImage(len(odd), "", 0, "it has no kernel other in a section of its own")]
    assert driver.compared == []


def test_of_two_codes_that_the_driver_may_take_none_is_cut() -> None:
    packed = ib.container(ib.entry(MANY), ib.entry(MANY, flags=ib.SPECIFIC))
    out = record(driver := Driver(packed, ["a"], []))
    assert [m.image for m in out.records] == [packed]
    assert out.images == [WholeImage(len(packed), "")]
    assert driver.compared == []


def test_an_image_whose_code_is_not_known_stays_whole_without_asking_the_driver() -> None:
    for packed, options, cause in [
        (ib.container(ib.entry(image("a")), ib.entry(image("a"))), {}, "2 pieces of code for sm_90"),
        (PACKED, {"CUDA_FORCE_PTX_JIT": "1"}, "CUDA_FORCE_PTX_JIT"),
    ]:
        driver = Driver(packed, ["a"], [])
        out = record(driver, **options)
        assert [m.image for m in out.records] == [packed]
        assert cause in out.images[0].kept_because
        assert driver.compared == []


def test_an_image_without_other_code_is_recorded_as_it_is() -> None:
    driver = Driver(image("a"), ["a"], [])
    out = record(driver)
    assert (out.records[0].image, out.images, driver.compared) == (image("a"), [WholeImage(len(image("a")), "")], [])


def test_an_address_in_a_global_becomes_a_relocation_wherever_the_global_begins() -> None:
    target = GlobalRange(0x7F00_0000_1000, 64, Symbol(0, "target"))
    holder = GlobalRange(0x7F00_0000_2004, 30, Symbol(0, "holder"))
    data = np.zeros(30, np.uint8)
    data[4:12] = np.frombuffer((0x7F00_0000_1008).to_bytes(8, "little"), np.uint8)  # aligned in memory
    data[13:21] = data[4:12]  # in a packed struct
    data[21:29] = np.frombuffer((0x7F00_0000_1041).to_bytes(8, "little"), np.uint8)  # behind the end
    modules = RecordedModules([ModuleRecord(0, b"", [("holder", data)])], [holder, target])
    symbols = Symbols(modules.ranges)
    rows = symbols.replace_in_globals(modules)
    assert rows.tolist() == np.array([(0, 4, 0, 0, 8), (0, 13, 0, 0, 8)], _rankpatch.relocation_dtype).tolist()
    assert symbols.used == [Symbol(0, "target")]
    ((_, kept),) = modules.records[0].globals
    assert not kept[4:12].any()
    assert not kept[13:21].any()
    assert np.array_equal(kept[21:], data[21:])
