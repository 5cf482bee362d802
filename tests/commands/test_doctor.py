"""doctor: each fault is a real one, or a stand-in for a machine that is not at hand."""

import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from namespaces import missing, two_hosts

from lockstep.commands.doctor import command, machine, network
from lockstep.commands.doctor.children import Child, run
from lockstep.commands.doctor.command import follow
from lockstep.commands.doctor.machine import Machine, agreement
from lockstep.commands.doctor.plan import Finding, Plan, graded
from lockstep.distributed.rendezvous import listen_at, serve
from lockstep.errors import UserError
from tests import inprocess
from tests.subprocesses import Command, run_lockstep

PATIENT_S = 60.0
MIB = 2**20


def only(found: Iterable[Any], check: str) -> Finding:
    (one,) = [each for each in found if isinstance(each, Finding) and each.check == check]
    return one


# The command


@pytest.mark.parametrize(("chosen", "message"), [
    ({"nproc": 0}, "--nproc 0"), ({"nproc": "4:2"}, "--nproc 4:2"), ({"nnodes": 0}, "--node-rank 0 with --nnodes 0"),
    ({"nnodes": 2, "node_rank": 2}, "--node-rank 2"), ({"timeout": 0.0}, "--timeout 0"),
    ({"timeout": float("nan")}, "--timeout nan"), ({"nnodes": 2, "master_addr": "a"}, "several machines need"),
    ({"only": ("hosts",)}, "unknown part 'hosts'"),
])  # fmt: skip
def test_flags_that_can_not_be(chosen: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as raised:
        Plan(**chosen)  # type: ignore[arg-type]
    assert raised.value.message.startswith(message)
    assert raised.value.remedy


def test_the_first_case_that_is_true_decides() -> None:
    worse, bad = (True, "fail", "Do that."), (True, "warn", "Do.")
    assert graded("a", "m", worse, bad) == Finding("a", "fail", "m", "Do that.")
    assert graded("a", "m", (False, "fail", "Do that."), bad) == Finding("a", "warn", "m", "Do.")
    assert graded("a", "m", (False, "fail", "Do that.")) == Finding("a", "ok", "m")


def test_the_command_here(tmp_path: Path) -> None:
    """All parts on this machine; a machine that is busy or short of something may have warnings."""
    ended = run_lockstep("doctor", "--json", "--timeout", "60", cwd=tmp_path, timeout=120)
    plain = json.loads(ended.out)
    failures = [each for each in plain["findings"] if each["status"] == "fail"]
    assert ended.code == (1 if failures else 0), ended.text
    assert plain["healthy"] == (not failures)
    assert not [each for each in failures if each["check"] not in ("devices", "torch", "/dev/shm")], failures
    checks = [each["check"] for each in plain["findings"]]
    assert [name for name in checks if name != "NCCL version"] == [
        *("torch", "devices", "launcher", "cores", "/dev/shm", "open files", "checkpoint disk", "host name"),
        *("interfaces", "port", "gloo"),
    ]
    assert all(each["remedy"] for each in plain["findings"] if each["status"] in ("warn", "fail"))
    assert not ended.orphans
    assert not list(tmp_path.iterdir())


def test_a_failure_has_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as other:
        number = other.getsockname()[1]
        out, err = inprocess.said(capsys, "doctor", "--only", "network", "--master-port", number, code=1)
    assert f"fail    port               port {number}: Address already in use" in out
    assert "name another by --master-port" in out
    assert out.splitlines()[-1].endswith(" 1 failure(s)")
    assert err == ""
    assert "doctor takes flags alone, got digits" in inprocess.said(capsys, "doctor", "digits", code=2)[1]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("interface", "seconds"), [("", "15"), ("lo", "1")], ids=["found by itself", "a wrong one named"]
)
def test_two_hosts(tmp_path: Path, interface: str, seconds: str) -> None:
    """Two machines meet; their own names lead to the loopback, as most of Debian's do."""
    if why := missing():
        pytest.skip(why)
    env = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    with two_hosts() as link:
        flags = ("--only", "machines", "--timeout", seconds, "--nnodes", "2", "--master-port", "29555")
        words = (sys.executable, "-m", "lockstep", "doctor", *flags, "--master-addr", link.hosts[0].address)
        started = [
            Command(*host.prefix, *words, "--node-rank", str(rank), cwd=tmp_path, env=env)
            for rank, host in reversed([*enumerate(link.hosts)])
        ]
        there, here = (each.end(120) for each in started)
    assert f"ok      machine 0          {link.hosts[0].address}:29555: connected from" in there.out, there.text
    for ended in (here, there):
        assert "ok      versions           the same on 2 machines" in ended.out
        if interface:
            assert ended.code == 1, ended.text
            assert "fail    machines           meeting the others over gloo by lo: " in ended.out
            assert "has to name the interface between them" in ended.out
        else:
            assert ended.code == 0, ended.text
            assert "ok      clock " in ended.out
            assert "ok      gloo to machines   2 machines: right sums" in ended.out


# Processes with a deadline


def slow(seconds: float) -> Iterator[object]:
    yield "sleeping"
    yield 1.5
    time.sleep(seconds)


def leaves() -> Iterator[str]:
    yield "leaving"
    os._exit(7)


def fails() -> Iterator[str]:
    yield "computing"
    os.write(1, b"from C\n")
    raise ValueError(os.environ["ONLY_HERE"])


def stopped(rank: int, number: int) -> Iterator[object]:
    """A rank of two whose rank 1 is stopped before it meets the other."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    yield from network.all_reduce("gloo", rank, ("cpu", "cpu"), number, 2.0)


def killed(rank: int, number: int) -> Iterator[object]:
    """A rank of two whose rank 0 is killed in its first all-reduce."""
    for said in network.all_reduce("gloo", rank, ("cpu", "cpu"), number, PATIENT_S):
        yield said
        if rank == 0 and str(said).startswith("in an all-reduce"):
            os.kill(os.getpid(), signal.SIGKILL)


def wrong(rank: int, number: int) -> Iterator[object]:
    """A rank whose backend adds nothing up."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg

    dist.init_process_group("fake", rank=rank, world_size=2, store=dist.HashStore())
    yield from network.timed(rank, 2, torch.device("cpu"))


def ranks(fn: Any, seconds: float) -> list[Child]:
    store = serve(listen_at("127.0.0.1", 0), 2, timedelta(seconds=PATIENT_S))
    return run([(fn, rank, store.port) for rank in range(2)], seconds)


def test_a_deadline_an_error_and_an_end_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    (late,) = run([(slow, 600.0)], 0.2)
    assert (late.values, late.error, late.stage, late.done) == ([1.5], "", "sleeping", False)
    well, failed = run([(slow, 0.0), (fails,)], 600.0, {**os.environ, "ONLY_HERE": "yes"})
    assert (well.values, well.done) == ([1.5], True)
    assert (failed.stage, failed.error) == ("computing", "ValueError: yes")
    gone, alone = run([(leaves,), (slow, 600.0)], 600.0)  # nobody waits for the other one
    assert (gone.error, alone.done, alone.error) == ("died with exit code 7", False, "")
    found = list(follow("storage", 0.2, slow, 600.0))
    assert found == [1.5, Finding("storage", "fail", "sleeping: no end in 0.2 s", command._HANGS["storage"])]
    assert only(follow("launcher", 60.0, leaves), "launcher").message == "leaving: died with exit code 7"
    assert not multiprocessing.active_children()
    assert "from C" not in capfd.readouterr().out


def test_ranks_that_are_stopped_killed_or_compute_wrong() -> None:
    found = network.outcome("gloo", ranks(stopped, 2.0), 2.0)
    assert (found.check, found.status) == ("gloo", "fail")
    assert "no end in 2 s: rank 0 (pid " in found.message
    assert "starting, stopped by a signal (SIGSTOP, Ctrl-Z)" in found.message
    assert found.remedy.startswith("Continue the process")
    found = network.outcome("gloo", ranks(killed, PATIENT_S), PATIENT_S)
    assert found.message == "rank 0, in an all-reduce of 64 KiB: died with exit code -9"
    found = network.outcome("gloo", ranks(wrong, PATIENT_S), PATIENT_S)
    assert "16367 of 16384 sums are wrong after an all-reduce of 65536 bytes" in found.message
    assert found.remedy
    assert not multiprocessing.active_children()


def test_all_reduces_of_this_machine() -> None:
    two, three = network.on_host(Machine(backend="fast", names=["cpu"] * 3), PATIENT_S, dict(os.environ))
    assert two.status == "ok", two
    assert two.message.startswith("2 rank(s): right sums; bus bandwidth in GB/s: 64 KiB ")
    assert (three.check, three.status) == ("fast", "fail")
    assert "rank " in three.message
    (nonsense,) = network.on_host(Machine(), PATIENT_S, {**os.environ, "GLOO_SOCKET_IFNAME": "nonsense"})
    assert "Unable to find address for: nonsense" in nonsense.message
    assert nonsense.remedy == "Unset GLOO_SOCKET_IFNAME, or name an interface that is up."


@pytest.mark.parametrize("cure", ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NOTHING"])
def test_gpus_are_tried_by_another_path(cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host where peer-to-peer copies hang would behave; the ranks themselves are stood in for."""
    process: Any = multiprocessing.Process()

    def group(backend: str, names: Sequence[str], seconds: float, environ: Mapping[str, str]) -> list[Child]:
        done = backend == "gloo" or bool(environ.get(cure))
        stage = "in an all-reduce of 64 KiB"
        return [Child(process, stage, [(MIB, 0.001)] if done else [], done=done) for _ in names]

    monkeypatch.setattr(network, "group", group)
    two_gpus = Machine(backend="nccl", kind="cuda", names=["H200", "H200"])
    gloo, found = network.on_host(two_gpus, 5.0, {})
    assert (gloo.status, found.check, found.status) == ("ok", "nccl", "fail")
    assert "no end in 5 s: rank 0 (pid None) in an all-reduce of 64 KiB; rank 1" in found.message
    assert found.remedy.startswith(f"With {cure}=1 it works: set that." if cure != "NOTHING" else "Check firewalls")


@pytest.mark.gpu
def test_the_gpus_of_this_machine() -> None:
    (child,) = run([(machine.look, "auto")], 120.0)
    (found,) = child.values
    assert found.kind == "cuda"
    for finding in [*agreement(found, "auto"), *network.on_host(found, 120.0)]:
        assert finding.status == "ok", finding


# torch, CUDA, driver and NCCL: versions stand in for machines that are not at hand

GPU = {
    "torch": "2.12.0", "cuda": "12.8", "kind": "cuda", "backend": "nccl", "names": ["H200", "H200"],
    "free_gib": [139.0, 138.0], "nvidia": 2, "driver": "570.86.15", "driver_cuda": "12.8", "nccl_built": "2.27.5",
    "nccl_loaded": "2.27.5",
}  # fmt: skip
BLIND = {"kind": "cpu", "names": [], "free_gib": []}


@pytest.mark.parametrize(("changed", "wanted", "check", "status", "said"), [
    ({}, "auto", "torch", "ok", "built for CUDA 12.8"), ({}, "auto", "NCCL version", "ok", "2.27.5"),
    ({}, "auto", "devices", "ok", "2 x H200"), ({}, "cpu", "devices", "skipped", "CPU"),
    ({"driver_cuda": "12.4"}, "auto", "torch", "ok", "up to 12.4"),
    ({"driver_cuda": "13.0"}, "auto", "torch", "ok", "up to 13.0"),
    ({"cuda": "13.0"}, "auto", "torch", "fail", "a torch built for CUDA 12,"),
    ({"cuda": "12.1", "driver_cuda": "11.8"}, "auto", "torch", "fail", "a torch built for CUDA 11,"),
    ({"cuda": "", "nccl_built": "", **BLIND}, "auto", "torch", "fail", "Install a torch with CUDA"),
    ({"cuda": "", "nccl_built": "", **BLIND}, "auto", "devices", "skipped", "CPU"),
    ({"driver_cuda": "", **BLIND}, "auto", "torch", "fail", "--gpus all"),
    ({"error": "No CUDA GPUs are available", **BLIND}, "auto", "devices", "fail", "No CUDA GPUs are available"),
    ({"error": "No CUDA GPUs are available", **BLIND}, "auto", "devices", "fail", "CUDA_VISIBLE_DEVICES is not set"),
    ({"nccl_loaded": "2.28.0"}, "auto", "NCCL version", "warn", "and loads 2.28.0"),
    ({"nccl_loaded": "2.20.5"}, "auto", "NCCL version", "fail", "unset LD_LIBRARY_PATH"),
    ({"nccl_loaded": "3.0.0"}, "auto", "NCCL version", "fail", "and loads 3.0.0"),
    ({"wrong": ["cuda:1: a product is wrong"]}, "auto", "devices", "fail", "cuda:1: a product is wrong"),
    ({"free_gib": [139.0, 0.5]}, "auto", "devices", "warn", "0.5 GiB free"),
    ({}, "xpu", "devices", "fail", "Use --device cuda"),
    ({"nvidia": 0, **BLIND}, "cuda", "devices", "fail", "torch sees none"),
    ({"nvidia": 0, "kind": "xpu"}, "auto", "torch", "ok", "torch 2.12.0"),
])  # fmt: skip
def test_another_machine(changed: dict[str, Any], wanted: str, check: str, status: str, said: str) -> None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    found = only(agreement(Machine(**{**GPU, **changed}), wanted), check)
    assert found.status == status, found
    assert said.lower() in f"{found.message} {found.remedy}".lower()
    assert bool(found.remedy) == (status in ("warn", "fail"))


def test_this_machine() -> None:
    *_, found = machine.look("cpu")
    assert isinstance(found, Machine)
    assert found.torch
    assert not found.names  # --device cpu leaves devices alone
    machine.compute("cpu")
    with pytest.raises(NotImplementedError):
        machine.compute("meta")  # a device without data


# The host


def test_variables_of_launchers() -> None:
    here = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}
    here["MASTER_PORT"] = "29500"

    def launcher(environ: dict[str, str]) -> Finding:
        return only(machine.launcher(Plan(), Machine(), environ), "launcher")

    assert launcher({"MASTER_ADDR": "node1"}).status == "ok"
    found = launcher(here)
    assert (found.status, found.message) == ("warn", "rank 1 of 4: a run from here waits for others")
    for lost in here:
        found = launcher({name: value for name, value in here.items() if name != lost})
        assert found.status == "fail"
        assert f"{lost} not" in found.message
        assert "unset" in found.remedy
    assert launcher({**here, "RANK": "9"}).status == "fail"


@given(st.integers(1, 64), st.integers(1, 64), st.none() | st.floats(0.5, 64))
def test_what_the_remedy_says_is_well(usable: int, processes: int, quota: float | None) -> None:
    found = machine.cores(processes, usable, quota, 64.0)
    limit = min(usable, quota or usable)
    assert (found.status == "warn") == (processes * max(1, usable // processes) > limit)
    if found.status == "warn":
        words = found.remedy.replace(",", "").split()
        fewer = int(words[words.index("--nproc") + 1]) if "--nproc" in words else processes
        assert fewer * int(words[words.index("--threads") + 1]) <= max(1, limit)


def test_cores_that_others_use() -> None:
    found = machine.cores(1, 4, None, 1.2)
    assert (found.status, "1.2 of them free" in found.message) == ("warn", True)
    assert machine.cores(1, 4, None, 3.9).status == "ok"
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from lockstep.commands.doctor.machine import cores_got; assert 0 < cores_got(3) < 1.2"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("this user may mount no file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_little_shared_memory_and_a_full_disk(tiny: Path) -> None:
    found = machine.shm(tiny)
    assert found.status == "warn"
    assert found.message == "2 MiB free; 64 MiB of it can't be had: No space left on device"
    assert "--shm-size" in found.remedy
    found = machine.disk(tiny)
    assert (found.status, found.message) == ("fail", f"{tiny}: No space left on device")
    assert "Free some space" in found.remedy
    assert not list(tiny.iterdir())
    assert machine.shm(Path("/nowhere")).status == "skipped"


@pytest.mark.parametrize(("limit", "status"), [(100, "fail"), (512, "warn"), (1024, "ok")])
def test_open_files(limit: int, status: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        found = machine.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (found.status, bool(found.remedy)) == (status, status != "ok")
    assert f"ulimit -n is {limit}" in found.message


def test_a_folder_for_runs(tmp_path: Path) -> None:
    said, found = machine.storage(Plan(out=str(tmp_path / "not/there/yet")), Machine())
    assert said == f"writing 64 MiB to {tmp_path}/not/there/yet"
    assert isinstance(found, Finding)
    assert found.status in ("ok", "warn"), found  # a slow disk is no fault of the program
    assert found.message.startswith(f"{tmp_path}: writes ")
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").touch()
    found = machine.disk(tmp_path / "runs")
    assert (found.status, "--out" in found.remedy) == ("fail", True)


# Names, interfaces, ports, and the way to machine 0


def unknown_name(name: str, _: object) -> list[Any]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_this_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, alone, several in (("127.0.1.1", "ok", "warn"), ("10.0.0.5", "ok", "ok")):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, a=address: [(0, 0, 0, "", (a, 0))])
        assert [network.host_name("me", many).status for many in (False, True)] == [alone, several]
    monkeypatch.setattr(socket, "getaddrinfo", unknown_name)
    assert [network.host_name("me", many).status for many in (False, True)] == ["warn", "fail"]
    assert "`ADDRESS me` in /etc/hosts" in network.host_name("me", True).remedy


def test_interfaces() -> None:
    lo, eth, bare = {"lo": ["127.0.0.1", "::1"]}, {"eth0": ["10.0.0.5"]}, {"eth2": list[str]()}
    assert network.up(lo | eth | bare) == Finding("interfaces", "ok", "lo 127.0.0.1; eth0 10.0.0.5")
    assert network.up(lo | bare).status == "warn"
    assert network.up(eth).remedy == "`ip link set lo up`."
    assert network.up(bare).status == "fail"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as other:
        number = other.getsockname()[1]
        found = network.port(number)
    assert found.status == "fail"
    assert f"port {number}: Address already in use" in found.message
    if sys.platform == "linux":
        assert f"(pid {os.getpid()})" in found.message
    assert network.port(number).status == network.port(0).status == "ok"


def test_the_way_to_machine_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        number = there.getsockname()[1]
        found = network.reach("127.0.0.1", number)
        assert (found.status, "connected from 127.0.0.1 by " in found.message) == ("ok", True)
    found = network.reach("127.0.0.1", number, 0.1)
    assert "refused: nothing listens there" in found.message

    def listen() -> None:
        with socket.create_server(("127.0.0.1", number)) as doctor:
            doctor.accept()[0].close()

    late = threading.Timer(0.5, listen)
    late.start()
    assert network.reach("127.0.0.1", number).status == "ok", "it waits for a doctor that starts later"
    late.join()

    def raises(error: OSError) -> Any:
        def connect(*_: object) -> socket.socket:
            raise error

        return connect

    for error, said, remedy in (
        (TimeoutError("timed out"), "no answer: packets are dropped", "firewalls"),
        (OSError(113, "No route to host"), "No route to host", "ip route get"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known", "/etc/hosts"),
    ):
        monkeypatch.setattr(socket, "create_connection", raises(error))
        found = network.reach("node1", 1)
        assert (found.status, said in found.message, remedy in found.remedy) == ("fail", True, True), found


def test_a_name_that_leads_to_the_loopback_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        connect = socket.create_connection
        monkeypatch.setattr(socket, "create_connection", lambda place, _: connect(("127.0.0.1", place[1])))
        found = network.reach("node1", there.getsockname()[1])
    assert (found.status, "give the address" in found.remedy) == ("warn", True)


def test_machines_that_meet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    plans = [
        Plan(nnodes=2, node_rank=rank, master_addr="127.0.0.1", master_port=number, timeout=PATIENT_S)
        for rank in range(2)
    ]
    first, second = run([(network.machines, plan) for plan in plans], 4 * PATIENT_S)
    for child in (first, second):
        assert child.done, child
        assert only(child.values, "versions").message == "the same on 2 machines"
        assert only(child.values, "gloo to machines").message.startswith("2 machines: right sums")
        assert only(child.values, "clock").status == "ok"
    assert only(second.values, "machine 0").status == "ok"
