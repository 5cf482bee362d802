"""What the kernel tells of processes, control groups, ports and interfaces: real ones, or files in its place."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from lockstep.distributed import proc, rendezvous
from lockstep.errors import UserError


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_narrowest_group_of_version_2_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "fs", tmp_path / "membership"
    membership.write_text("4:memory:/box/job\n2:cpu,cpuacct:/box/job\n0::/box/job\n")
    write(root / "box/job/cpu.max", "max 100000\n")
    write(root / "box/cpu.max", "150000 100000\n")
    write(root / "cpu.max", "400000 100000\n")
    assert proc.cpu_quota(root, membership) == 1.5
    assert proc.cpu_quota(tmp_path, tmp_path / "none") is None, "without groups there is no limit"


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
    program = "from lockstep.distributed import proc; print(proc.machine())"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert asked.stdout.strip() == proc.machine()
    assert proc.machine().startswith(socket.gethostname())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only root is told")
def test_who_listens_at_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        assert proc.listener_at(number) == f"{psutil.Process().name()} (pid {os.getpid()})"
    assert proc.listener_at(number) == ""


def test_a_port_table_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_connections", Mock(side_effect=psutil.AccessDenied))
    assert proc.listener_at(80) == ""


def test_the_processor_has_a_name() -> None:
    assert proc.cpu_model()


@pytest.mark.skipif(sys.platform != "linux", reason="the flags of interfaces lie elsewhere")
def test_interfaces_are_those_that_the_kernel_says_are_up_or_all_where_it_hides_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {name for _, name in socket.if_nameindex()}
    flags = {name: int(Path("/sys/class/net", name, "flags").read_text(), 16) for name in names}
    assert rendezvous.interfaces().keys() == {name for name in names if flags[name] & 1}  # IFF_UP of linux/if.h

    monkeypatch.setattr(psutil, "net_if_stats", Mock(side_effect=FileNotFoundError))
    assert rendezvous.interfaces().keys() == names


def test_too_few_open_files_are_allowed_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, kept[1]))
    try:
        proc.require_room(4, 1, 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (84, kept[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    with pytest.raises(
        UserError, match=r"24 open files are allowed here, .* 2 process\(es\) .* may need 72\n  .*ulimit -n 1024"
    ):
        proc.require_room(2, 1, 2)


def test_too_few_threads_are_told_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def refusing(thread: threading.Thread) -> None:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", refusing)
    with pytest.raises(UserError, match=r"may start 5 more threads and processes here, .* need 26\n.*ulimit -u"):
        proc.require_room(2, 1, 1)
    assert threading.active_count() == before
