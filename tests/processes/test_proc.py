"""What the kernel tells of processes, control groups, ports and interfaces: real ones, or files in its place."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.errors import UserError
from lockstep.processes import network, proc

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    path = tmp_path / "membership"
    path.write_text("4:memory:/box/job\n2:cpu,cpuacct:/box/job\n0::/box/job\n")
    return path


@pytest.mark.parametrize("base", ["", "unified"])
def test_the_narrowest_group_of_version_2_counts(tmp_path: Path, base: str, membership: Path) -> None:
    root = tmp_path / "fs" / base
    write(root / "box/job/cpu.max", "max 100000\n")
    write(root / "box/cpu.max", "150000 100000\n")
    write(root / "cpu.max", "400000 100000\n")
    write(root / "box/job/memory.max", f"{2 * GIB}\n")
    write(root / "box/job/memory.current", f"{GIB}\n")
    write(root / "box/job/memory.stat", f"anon 5\ninactive_file {GIB // 2}\n")
    write(root / "box/memory.max", "max\n")
    write(root / "box/memory.current", "7\n")
    write(root / "memory.max", f"{8 * GIB}\n")
    write(root / "memory.current", f"{GIB}\n")
    assert proc.cpu_quota(tmp_path / "fs", membership) == 1.5
    assert proc.memory_left(tmp_path / "fs", membership) == 1.5 * GIB


def test_groups_of_version_1_count(tmp_path: Path, membership: Path) -> None:
    root = tmp_path / "fs"
    write(root / "cpu,cpuacct/box/cpu.cfs_quota_us", "50000")
    write(root / "cpu,cpuacct/box/cpu.cfs_period_us", "100000")
    write(root / "cpu,cpuacct/box/job/cpu.cfs_quota_us", "-1")
    write(root / "cpu,cpuacct/box/job/cpu.cfs_period_us", "100000")
    write(root / "memory/box/job/memory.limit_in_bytes", str(GIB))
    write(root / "memory/box/job/memory.usage_in_bytes", str(GIB // 2))
    write(root / "memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    write(root / "memory/memory.usage_in_bytes", "1")
    assert proc.cpu_quota(root, membership) == 0.5
    assert proc.memory_left(root, membership) == GIB // 2


def test_without_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert proc.cpu_quota(tmp_path, tmp_path / "none") is None
    assert proc.memory_left(tmp_path, tmp_path / "none") is None


def test_the_driver_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 12.2\n"
    )
    assert proc.nvidia_driver(file) == "550.54.15"
    assert proc.nvidia_driver(tmp_path / "none") == ""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def until(wanted: str, pid: int) -> str:
    """The state of a process when it is this one, or after ten seconds."""
    deadline = time.monotonic() + 10
    while not proc.state(pid).startswith(wanted) and time.monotonic() < deadline:
        time.sleep(0.01)
    return proc.state(pid)


def test_the_states_of_a_process(child: subprocess.Popen[bytes]) -> None:
    pid = child.pid
    since = proc.born(pid)
    assert until("sleeping", pid).startswith("sleeping")
    assert 0 < since == proc.born(pid)
    child.send_signal(signal.SIGSTOP)
    assert until("stopped", pid) == "stopped by a signal (SIGSTOP, Ctrl-Z)"
    assert proc.alive(pid, since)
    proc.wake(pid, since + 100)  # a later process of the same number
    assert proc.state(pid).startswith("stopped")
    proc.wake(pid, since)
    assert until("sleeping", pid).startswith("sleeping")
    child.kill()
    assert until("dead", pid) == "dead"  # a zombie: nobody has read its exit code
    assert not proc.alive(pid)
    child.wait()
    assert proc.state(pid) == proc.state(pid, since) == proc.GONE
    assert (proc.born(pid), proc.alive(pid)) == (0, False)
    proc.wake(pid, since)


def test_a_later_process_of_the_same_number_is_not_the_one_that_is_meant() -> None:
    me, since = os.getpid(), proc.born(os.getpid())
    assert proc.state(me, since).startswith("running")
    assert proc.alive(me, since)
    assert proc.state(me, since - 100) == proc.GONE
    assert not proc.alive(me, since - 100)


def test_processes_that_see_each_other_share_a_machine() -> None:
    program = "from lockstep.processes import proc; print(proc.machine())"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert asked.stdout.strip() == proc.machine()
    assert proc.machine().startswith(socket.gethostname())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_who_has_a_handler_for_a_signal() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert proc.catches(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not proc.catches(os.getpid(), signal.SIGUSR1)
    assert not proc.catches(1 << 30, signal.SIGUSR1)  # nobody


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc here")
def test_a_file_that_a_process_has_open(tmp_path: Path) -> None:
    with (tmp_path / "file-of-this-test").open("w"):
        found = proc.descriptor("self", "file-of-this-test")
        assert found is not None
        assert found.readlink() == tmp_path / "file-of-this-test"
    assert proc.descriptor(os.getpid(), "file-of-this-test") is None
    assert proc.descriptor(1 << 30, "") is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only root is told")
def test_who_listens_at_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        assert proc.listener_at(number) == f"{psutil.Process().name()} (pid {os.getpid()})"
    assert proc.listener_at(number) == ""


def test_a_port_table_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(kind: str) -> list[object]:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    assert proc.listener_at(80) == ""


def test_the_processor_has_a_name() -> None:
    assert proc.cpu_model()


def test_an_interface_that_vanishes_or_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [*socket.if_nameindex(), (9999, "gone0")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: seen)
    found = network.interfaces()
    assert [each.name for each in found] == [name for _, name in seen]
    assert found[-1] == network.Interface("gone0", False, ())
    assert not found[-1].usable


@pytest.mark.skipif(sys.platform != "linux", reason="the flags of interfaces lie elsewhere")
def test_an_interface_is_up_where_the_kernel_says_so() -> None:
    for each in network.interfaces():
        flags = int(Path("/sys/class/net", each.name, "flags").read_text(), 16)
        assert each.up == bool(flags & 1), each  # IFF_UP of linux/if.h


def test_too_few_open_files_are_allowed_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, kept[1]))
    try:
        proc.require_descriptors(4)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (80, kept[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    with pytest.raises(
        UserError, match=r"24 open files are allowed here, .* 2 processes may need 64\n  .*ulimit -n 1024"
    ):
        proc.require_descriptors(2)
