# SPDX-License-Identifier: Apache-2.0
"""Each trouble is one line with what to do, in environments that are prepared to have it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foundryd import _native
from foundryd.cli.environment import driver_environment
from foundryd.daemon.launch import start_daemon
from foundryd.daemon.runtime import RuntimeDir
from foundryd.doctor import device, examine, system
from foundryd.doctor.elf import defines
from foundryd.doctor.finding import Level, Surroundings

CHECKS = {"driver", "gpu", "nccl", "nvshmem", "torch", "shm", "memory", "hook", "preload", "runtime", "daemon"}


def clean(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FOUNDRYD_")}
    for name in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES"):
        kept.pop(name, None)
    return kept | changes


def soft(**changes: str) -> dict[str, str]:
    env = clean()
    return env | driver_environment("soft", env) | changes


@pytest.fixture
def around(folder):
    def make(env=None, **changes):
        return Surroundings(clean() if env is None else env, changes.pop("runtime_dir", folder / "run"), **changes)

    return make


def doctor(env, runtime_dir, *options):
    line = [sys.executable, "-P", "-m", "foundryd.cli", "doctor", "--runtime-dir", str(runtime_dir), *options]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=110)


def only(findings, check):
    (one,) = [f for f in findings if f.check == check]
    return one


def well_put(finding):
    """One line, and what to do if it is not well."""
    assert "\n" not in finding.message
    return bool(finding.message) and bool(finding.fix) == (finding.level is not Level.OK)


# --- the command -----------------------------------------------------------------------------------------------------


def test_json_has_every_check_and_the_software_driver_s_gpus(folder):
    done = doctor(soft(), folder / "run", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["errors"] else 0)
    assert report["ok"] == (report["errors"] == 0)
    found = report["findings"]
    assert {f["check"] for f in found} <= CHECKS
    assert {"driver", "gpu", "nccl", "shm", "memory", "hook", "preload", "runtime", "daemon"} <= {
        f["check"] for f in found
    }
    assert all(set(f) == {"check", "level", "message", "fix", "facts"} for f in found)
    assert {f["level"] for f in found} <= {"ok", "warning", "error"}
    assert report["warnings"] == sum(f["level"] == "warning" for f in found)
    (driver,) = [f for f in found if f["check"] == "driver"]
    assert driver["facts"]["paths"] == [str(Path(_native.soft_folder(), "libcuda.so.1").resolve())]
    assert driver["message"].startswith("the software driver with CUDA ")
    gpus = [f for f in found if f["check"] == "gpu"]
    assert [f["facts"]["index"] for f in gpus] == list(range(len(gpus)))
    assert len({f["facts"]["uuid"] for f in gpus}) == len(gpus)


def test_an_error_is_the_exit_status_and_has_its_fix(folder):
    (folder / "run").mkdir()
    (folder / "run").chmod(0o777)
    done = doctor(clean(), folder / "run")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("error   runtime"))
    assert "has mode 0777" in lines[place]
    assert lines[place + 1].strip() == f"-> chmod 0700 {folder / 'run'}"
    assert lines[-1].startswith("1 errors")


def test_a_check_that_fails_itself_is_an_error_and_the_others_go_on(around, monkeypatch):
    def broken(_):
        raise ZeroDivisionError("no")

    rows = (examine.Check("first", broken), examine.Check("memory", system.memory))
    monkeypatch.setattr(examine, "CHECKS", rows)
    first, second = examine.examine(around())
    assert (first.check, first.level) == ("first", Level.ERROR)
    assert "ZeroDivisionError" in first.message
    assert second.check == "memory"


# --- driver and libraries --------------------------------------------------------------------------------------------


def library(path: Path, source: str) -> Path:
    """A shared library from C code."""
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(path), "-"], input=source.encode(), check=True, timeout=60
    )
    return path


def found_first(folder: Path) -> dict[str, str]:
    return clean(LD_LIBRARY_PATH=str(folder))


def test_without_a_gpu_it_says_so_and_that_is_no_error(around, folder):
    empty = library(folder / "libcuda.so.1", "int cuInit(int f) { return 100; }")
    (line,) = device.gpus(around(found_first(folder)))
    assert line.level is Level.WARNING
    assert line.message == f"the driver at {empty} sees no GPU"
    assert "container with --gpus" in line.fix
    (line,) = device.gpus(around(found_first(folder) | {"CUDA_VISIBLE_DEVICES": ""}))
    assert line.fix == "correct CUDA_VISIBLE_DEVICES"


def test_no_driver_at_all_is_said(around, folder):
    (folder / "libcuda.so.1").write_text("no library")
    (line,) = device.gpus(around(found_first(folder)))
    assert line.level is Level.WARNING
    assert "there is no CUDA driver (" in line.message


@pytest.mark.parametrize(
    ("source", "message", "fix"),
    [
        ("int cuInit(int f) { return 803; }", "failed with error 803", "reboot"),
        ("int cuInit(int f) { return 999; }", "failed with error 999", "nvidia-smi"),
        ("int cuInit(int f) { return *(volatile int *)8; }", "ended by SIGSEGV", "nvidia-smi"),
        ("#include <unistd.h>\nint cuInit(int f) { for (;;) pause(); }", "did not end within 5 s", "nvidia-smi"),
    ],
)
def test_a_driver_that_fails_crashes_or_hangs_is_an_error(around, folder, source, message, fix):
    library(folder / "libcuda.so.1", source)
    (line,) = device.gpus(around(found_first(folder), timeout=5.0))
    assert line.level is Level.ERROR
    assert message in line.message
    assert fix in line.fix


def test_nccl_is_the_file_that_is_really_loaded(around, folder):
    source = "int ncclGetVersion(int *v) { *v = 22809; return 0; }"
    path = library(folder / "libnccl.so.2", source)
    nccl = only(device.libraries(around(found_first(folder))), "nccl")
    assert f"NCCL 2.28.9 from {path} (the loader)" in nccl.message
    assert nccl.facts["loader"]["paths"] == [str(path)]


def test_nvshmem_is_told_with_its_version(around, folder):
    source = "void nvshmemx_vendor_get_version_info(int *a, int *b, int *c) { *a = 3; *b = 4; *c = 5; }"
    path = library(folder / "libnvshmem_host.so.3", source)
    found = only(device.libraries(around(found_first(folder))), "nvshmem")
    assert f"NVSHMEM 3.4.5 from {path} (the loader)" in found.message


def test_the_capture_stub_in_an_engine_s_place_is_an_error(around):
    env = clean(LD_LIBRARY_PATH=str(_native.fake_nccl().parent))
    nccl = only(device.libraries(around(env)), "nccl")
    assert nccl.level is Level.ERROR
    assert "the stub for captures" in nccl.message


def test_two_files_of_one_library_are_a_warning():
    plain = {"paths": ["/a/libnccl.so.2"], "how": "the loader", "version": "2.27.1"}
    torch = {"paths": ["/b/libnccl.so.2"], "version": "2.28.9"}
    finding = device._nccl(plain, torch)
    assert finding.level is Level.WARNING
    assert "NCCL 2.27.1 from /a/libnccl.so.2 (the loader); NCCL 2.28.9 from /b/libnccl.so.2 (torch)" in finding.message
    assert device._nccl(plain, {**plain}).level is Level.OK


def test_mig_is_told_by_index_and_uuid():
    uuid = "00112233-4455-6677-8899-aabbccddeeff"
    gpu = {"index": 0, "name": "NVIDIA H200", "bytes": 1 << 34, "uuid": uuid}
    whole = device._gpu(gpu, [{"index": 3, "uuid": f"GPU-{uuid}", "mig": "off", "slices": []}])
    assert whole.level is Level.OK
    assert whole.message == f"GPU 0: NVIDIA H200, GPU-{uuid}, 16.0 GiB, MIG off"
    part = device._gpu(gpu, [{"index": 3, "uuid": "GPU-x", "mig": "on", "slices": [f"MIG-{uuid}"]}])
    assert part.level is Level.WARNING
    assert f"MIG-{uuid}" in part.message
    assert "a MIG slice of GPU 3" in part.message
    assert well_put(part)


# --- what is preloaded -----------------------------------------------------------------------------------------------


def preload_findings(around, *entries):
    return system.preloaded(around(clean(LD_PRELOAD=":".join(str(e) for e in entries))))


def test_an_empty_preload_is_well_and_the_hook_loads(around):
    hook, line = system.preloaded(around())
    assert (hook.check, hook.level) == ("hook", Level.OK)
    assert hook.facts["path"] == str(_native.hook_library())
    assert (line.level, line.message) == (Level.OK, "LD_PRELOAD is empty: foundryd run sets it")


def test_a_missing_file_is_named(around, folder):
    found = preload_findings(around, folder / "gone.so")
    (error,) = [f for f in found if f.level is Level.ERROR]
    assert error.message.startswith(f"{folder / 'gone.so'} of LD_PRELOAD cannot be loaded (cannot open shared object")
    assert well_put(error)


def test_the_hook_must_be_first(around, folder):
    other = library(folder / "other.so", "int harmless(void) { return 1; }")
    hook = _native.hook_library()
    assert [f.level for f in preload_findings(around, hook, other)] == [Level.OK, Level.OK]
    (error,) = [f for f in preload_findings(around, other, hook) if f.level is Level.ERROR]
    assert error.message == f"the hook comes after {other} in LD_PRELOAD, so it does not see every call"


def test_another_hook_of_another_install_is_named(around, folder):
    copy = folder / "libfoundryd_hook.so"
    shutil.copy(_native.hook_library(), copy)
    found = preload_findings(around, copy)
    assert any(f.level is Level.ERROR and "is not the installed" in f.message for f in found)


@pytest.mark.parametrize(
    ("first", "level"), [("other", Level.ERROR), ("hook", Level.WARNING), ("alone", Level.WARNING)]
)
def test_another_dlsym_hook_is_found_in_its_file(around, folder, first, level):
    source = "#define _GNU_SOURCE\n#include <dlfcn.h>\n"
    source += 'void *dlsym(void *h, const char *n) { return dlvsym(h, n, "GLIBC_2.2.5"); }'
    other = library(folder / "other.so", source)
    order = {"other": [other, _native.hook_library()], "hook": [_native.hook_library(), other], "alone": [other]}[first]
    lines = system._order([str(e) for e in order], _native.hook_library())
    (line,) = [f for f in lines if "replaces dlsym" in f.message]
    assert line.level is level
    assert str(other) in line.message


def test_symbols_are_read_from_files_and_nothing_else_is_taken_for_one(folder):
    assert defines(_native.hook_library(), {b"dlsym", b"no_such_symbol"}) == {b"dlsym"}
    plain = library(
        folder / "plain.so", 'extern void *dlsym(void *, const char *);\nvoid *f(void) { return dlsym(0, "x"); }'
    )
    assert defines(plain, {b"dlsym", b"f"}) == {b"f"}
    whole = plain.read_bytes()
    for text in (b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 100, whole[: len(whole) // 2]):
        (folder / "bad.so").write_bytes(text)
        assert defines(folder / "bad.so", {b"f"}) == set()
    assert defines(folder, {b"f"}) == set()


# --- memory ----------------------------------------------------------------------------------------------------------


def test_shared_memory_that_is_missing_or_small_is_said(around, folder):
    (line,) = system.shared_memory(around(root=folder))
    assert line.level is Level.ERROR
    assert well_put(line)
    assert system.shm_size(Path("/dev/shm"), 64 << 20, 64 << 20).level is Level.WARNING
    assert "--shm-size" in system.shm_size(Path("/dev/shm"), 64 << 20, 64 << 20).fix
    assert system.shm_size(Path("/dev/shm"), 64 << 30, 1 << 20).level is Level.WARNING
    assert system.shm_size(Path("/dev/shm"), 64 << 30, 64 << 30).level is Level.OK


@pytest.mark.parametrize(("limit", "level"), [(64 << 20, Level.WARNING), (8 << 30, Level.OK)])
def test_the_limit_of_a_control_group_is_told(around, folder, limit, level):
    group = folder / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(limit))
    (group / "memory.current").write_text("0")
    proc = folder / "proc/self"
    proc.mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    (proc / "cgroup").write_text("0::/pod\n")
    (proc / "mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n")
    (line,) = system.memory(around(root=folder))
    assert line.level is level
    assert f"the control group {group}" in line.message
    assert line.facts["bytes"] == limit - (32 << 20)


# --- runtime directory and daemon ------------------------------------------------------------------------------------


def runtime_finding(around, path):
    (line,) = system.runtime_directory(around(runtime_dir=path))
    assert well_put(line)
    return line


def test_the_runtime_directory_s_mode_owner_and_length_are_looked_at(around, folder):
    run = folder / "run"
    assert runtime_finding(around, run).message == f"{run} does not exist yet: foundryd start makes it"
    run.mkdir(mode=0o700)
    line = runtime_finding(around, run)
    assert line.level is Level.OK
    assert line.facts == {
        "path": str(run),
        "uid": os.geteuid(),
        "mode": "0700",
        "socket_path_bytes": len(str(run)) + len("/control"),
    }
    run.chmod(0o755)
    assert runtime_finding(around, run).level is Level.WARNING
    run.chmod(0o770)
    assert runtime_finding(around, run).fix == f"chmod 0700 {run}"
    assert runtime_finding(around, run).level is Level.ERROR
    (folder / "link").symlink_to(run)
    assert "not a directory of its own" in runtime_finding(around, folder / "link").message
    (folder / "file").touch()
    assert runtime_finding(around, folder / "file").level is Level.ERROR
    assert "has a path of" in runtime_finding(around, folder / ("x" * 120)).message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_user_s_runtime_directory_is_a_warning(around, folder):
    (folder / "run").mkdir(mode=0o700)
    os.chown(folder / "run", 65534, 65534)
    line = runtime_finding(around, folder / "run")
    assert line.level is Level.WARNING
    assert "belongs to user 65534" in line.message


def test_the_daemon_is_found_missing_hanging_or_well(around, folder):
    (line,) = system.daemon(around())
    assert line.level is Level.WARNING
    assert line.fix == f"foundryd start --runtime-dir {folder / 'run'} ARCHIVE"
    started = start_daemon(folder / "run", http=0, timeout=30)
    try:
        (line,) = system.daemon(around())
        assert line.level is Level.OK
        assert line.facts["pid"] == started.process.pid
        assert line.facts["http_port"] == started.status.http_port
        os.kill(started.process.pid, signal.SIGSTOP)
        (line,) = system.daemon(around(timeout=0.5))
        assert line.level is Level.ERROR
        assert "did not answer in time" in line.message
        RuntimeDir(folder / "run").door.unlink()
        (line,) = system.daemon(around(timeout=0.5))
        assert line.level is Level.ERROR
        assert f"pid {started.process.pid}) holds" in line.message
    finally:
        started.process.kill()
        started.process.wait()


def test_a_daemon_of_another_version_is_an_error(around, folder):
    import socket
    import threading

    from foundryd.daemon import messages, wire
    from foundryd.daemon.messages import Refused

    runtime = RuntimeDir(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(runtime.door))
        listener.listen()
        listener.settimeout(20)

        def serve():
            sock, _ = listener.accept()
            with sock:
                wire.receive(sock)
                wire.send(sock, messages.encode(Refused("protocol", "no", oldest=8, newest=9, build="foundryd 9")))

        thread = threading.Thread(target=serve)
        thread.start()
        (line,) = system.daemon(around(runtime_dir=folder))
        thread.join(20)
    assert line.level is Level.ERROR
    assert "versions 8 to 9" in line.message
