# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is known, and that another one is left alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, entry_points
from types import SimpleNamespace

import pytest

from foundryd.engines.vllm import plugin, seam, versions
from foundryd.engines.vllm.seam import Seam
from foundryd.errors import EngineUnsupported
from foundryd.settings import settings


@pytest.mark.parametrize("found", ["0.22.1", "0.22.1+cu130", "0.22.1.0"])
def test_a_release_in_the_range_is_known(found):
    assert versions.seams_of(found).__name__ == "foundryd.engines.vllm.v0_22"


OTHERS = ["0.22.0", "0.22.2", "0.23.0", "1.0.0", "0.22", "0.22.1rc1", "0.22.1.dev3+g12ab", "dev", "", "0.22.x"]


@pytest.mark.parametrize("found", OTHERS)
def test_another_version_is_refused_with_both(found):
    with pytest.raises(EngineUnsupported, match=r"knows 0\.22\.1 up to and without 0\.22\.2") as caught:
        versions.seams_of(found)
    assert f"vLLM is {found} and" in str(caught.value)


def test_without_vllm_its_version_is_not_known(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(EngineUnsupported, match="vLLM is not installed"):
        versions.installed()


def test_vllm_finds_the_plug_in():
    [found] = [e for e in entry_points(group="vllm.general_plugins") if e.name == "foundryd"]
    assert found.load() is plugin.register


# --- the plug-in ------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    def choose(mode):
        for name in ("FOUNDRYD_MODE", "FOUNDRYD_STARTUP_REPORT"):
            monkeypatch.delenv(name, raising=False)
        if mode:
            monkeypatch.setenv("FOUNDRYD_MODE", mode)
        settings.cache_clear()

    yield choose
    settings.cache_clear()


def test_without_a_mode_nothing_is_asked(environment, monkeypatch):
    environment("")
    monkeypatch.setattr(versions, "installed", lambda: pytest.fail("it was asked for the version"))
    plugin.register()


def test_an_unknown_version_restores_nothing_and_says_so_once(environment, monkeypatch, caplog):
    environment("restore")
    monkeypatch.setattr(versions, "installed", lambda: "0.99.0")
    with caplog.at_level(logging.WARNING, "foundryd"):
        plugin.register()
    [record] = caplog.records
    assert "as if foundryd were not installed (engine_unsupported): vLLM is 0.99.0" in record.message


def test_an_unknown_version_ends_a_capture(environment, monkeypatch):
    environment("capture")
    monkeypatch.setattr(versions, "installed", lambda: "0.99.0")
    with pytest.raises(EngineUnsupported, match=r"vLLM is 0\.99\.0"):
        plugin.register()


def test_a_setting_that_cannot_be_does_not_end_vllm(environment, monkeypatch, caplog):
    environment("sideways")
    with caplog.at_level(logging.WARNING, "foundryd"):
        plugin.register()
    assert "FOUNDRYD_MODE is 'sideways'" in caplog.text


@pytest.mark.parametrize("here", [True, False])
def test_a_process_without_the_hook_gives_it_to_those_it_starts(environment, monkeypatch, here):
    environment("restore")
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    monkeypatch.setattr(plugin._hook, "available", lambda: here)
    monkeypatch.setattr(versions, "installed", lambda: "0.22.1")
    monkeypatch.setattr(versions, "seams_of", lambda _: SimpleNamespace(install=lambda: None))
    plugin.register()
    libraries = os.environ["LD_PRELOAD"].split(":")
    assert libraries[-1] == "libother.so"
    assert len(libraries) == (1 if here else 2)
    assert here or libraries[0].endswith("libfoundryd_hook.so")


# --- seams ------------------------------------------------------------------------------------------------------------


def around(real, *arguments, **named):
    return ("around", real(*arguments, **named))


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A module of an engine; (name, seam of it)."""
    name = f"engine_{tmp_path.name.replace('-', '_')}"
    text = """
def loose(a, b=1): return a, b
class Owner:
    def method(self, a): return a
    @staticmethod
    def static(a): return a
"""
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda owner, at, *parameters: Seam(name, owner, at, parameters, around)
    sys.modules.pop(name, None)


def test_functions_methods_and_static_methods_are_wrapped_once_and_put_back(engine):
    seams = [engine("", "loose", "a"), engine("Owner", "method", "self", "a"), engine("Owner", "static", "a")]
    seam.install(seams)
    seam.install(seams)
    module = sys.modules[seams[0].module]
    assert module.loose(3) == ("around", (3, 1))
    assert module.Owner().method(4) == ("around", 4)
    assert module.Owner.static(5) == module.Owner().static(5) == ("around", 5)
    seam.remove(seams)
    assert (module.loose(3), module.Owner().method(4), module.Owner.static(5)) == ((3, 1), 4, 5)


@pytest.mark.parametrize(
    ("owner", "name", "parameters", "words"),
    [
        ("", "gone", (), "has no engine_"),
        ("Gone", "method", (), "has no engine_"),
        ("Owner", "method", ("self", "other"), "method takes self, a and its version should take self, other first"),
        ("Owner", "method", ("self", "a", "b"), "method takes self, a and"),
    ],
)
def test_an_engine_that_is_not_as_its_version_should_be_is_left_whole(engine, owner, name, parameters, words):
    good, bad = engine("", "loose", "a"), engine(owner, name, *parameters)
    with pytest.raises(EngineUnsupported, match=words):
        seam.install([good, bad])
    assert sys.modules[good.module].loose(3) == (3, 1)


# --- a process of vLLM ------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from vllm.config import ParallelConfig, VllmConfig
from vllm.engine import start
worker = start(VllmConfig(parallel_config=ParallelConfig(enable_eplb=True)))
from vllm.log import events
print(sum(what == "native capture" for what, _ in events), worker.model_runner.execute([3, 1]).shape[0])
"""


@pytest.fixture
def run_program(standin):
    """Runs the program under a command, with variables."""
    pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

    def run(*prefix, **variables):
        env = {name: value for name, value in os.environ.items() if not name.startswith("FOUNDRYD_")}
        env["PYTHONPATH"] = ":".join([*standin, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [*prefix, sys.executable, "-c", PROGRAM]
        return subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=100, check=False)

    return run


def test_a_command_under_foundryd_run_that_cannot_restore_is_refused_by_name_and_serves(run_program):
    done = run_program(sys.executable, "-m", "foundryd.cli", "run", "--driver", "soft", "--archive", "none", "--")
    assert (done.returncode, done.stdout.split()) == (0, ["3", "2"]), done.stderr
    assert done.stderr.count("capturing natively (engine_unsupported): enable_dbo, enable_eplb") == 1


def test_the_variables_alone_do_the_same(run_program):
    done = run_program(FOUNDRYD_MODE="restore", FOUNDRYD_ARCHIVE="none")
    assert (done.returncode, done.stdout.split()) == (0, ["3", "2"]), done.stderr
    assert done.stderr.count("capturing natively") == 1


def test_without_variables_vllm_does_not_know_of_foundryd(run_program):
    done = run_program()
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["3", "2"], "")
