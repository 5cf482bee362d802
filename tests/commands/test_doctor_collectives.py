"""All-reduces in real processes: right, wrong, stopped, killed, and on no interface."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.commands.doctor import children, collectives
from lockstep.commands.doctor.children import Child, Report
from lockstep.commands.doctor.collectives import Group
from lockstep.commands.doctor.devices import Machine
from lockstep.commands.doctor.finding import Finding, within

Started = tuple[Group, list[Child]]
SMALL = (64 << 10,)
PATIENT_S = 40.0


def wrong(report: Report, group: Group, listener: socket.socket) -> Any:
    """As a rank whose backend adds nothing up."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers it

    return collectives.all_reduce(report, group, 0, "cpu", listener)


def quiet(report: Report, seconds: float) -> float:
    report("sleeping")
    time.sleep(seconds)
    return seconds


def leaves(report: Report) -> None:
    os._exit(7)


def prints(report: Report) -> str:
    os.write(1, b"from C\n")
    return os.environ.get("ONLY_HERE", "")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SIZES", SMALL)


def gloo(seconds: float, environ: Mapping[str, str] = os.environ) -> Finding:
    return collectives.outcome("gloo", "2 ranks", *collectives.on_host("gloo", ("cpu", "cpu"), seconds, environ))


def signalled(monkeypatch: pytest.MonkeyPatch, rank: int, number: signal.Signals) -> None:
    """Each rank with this number gets a signal as soon as all are started."""
    run = partial(children.run, started=lambda pids: os.kill(pids[rank], number))
    monkeypatch.setattr(collectives, "run", run)


@pytest.mark.usefixtures("small")
def test_two_ranks_over_gloo() -> None:
    found = gloo(PATIENT_S)
    assert found.status in ("ok", "warn"), found  # a machine busy with other tests may be slow
    assert found.message.startswith("2 ranks: right sums; bus bandwidth in GB/s: 64 KiB ")
    assert found.numbers["bus_gb_per_s_65536"] > 0
    assert not multiprocessing.active_children()


def test_a_rank_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    signalled(monkeypatch, 1, signal.SIGSTOP)
    found = gloo(2.0)
    assert found.status == "fail"
    assert "no end in 2 s: rank 0 (pid " in found.message
    assert "stopped by a signal (SIGSTOP, Ctrl-Z)" in found.message
    assert found.remedy.startswith("Continue the process")
    assert not multiprocessing.active_children()


def test_a_rank_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    signalled(monkeypatch, 0, signal.SIGKILL)
    found = gloo(PATIENT_S)
    assert found.status == "fail"
    assert "2 ranks: rank 0, " in found.message
    assert found.message.endswith(": died with exit code -9")


def test_an_interface_that_does_not_exist() -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "nonsense"}
    found = gloo(PATIENT_S, environ)
    assert found.status == "fail"
    assert "Unable to find address for: nonsense" in found.message
    assert found.remedy == "Unset GLOO_SOCKET_IFNAME (nonsense), or name an interface that is up."


def test_wrong_sums() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        group = Group("fake", 2, PATIENT_S, listener.getsockname()[1], sizes=SMALL)
        ranks = children.run([(wrong, group, listener)], PATIENT_S)
    found = collectives.outcome("fake", "2 ranks", group, ranks, "No remedy.")
    assert found.status == "fail"
    assert "16367 of 16384 sums are wrong after an all-reduce of 65536 bytes" in found.message


def machine(backend: str, kind: str, count: int) -> Machine:
    return Machine(backend=backend, kind=kind, count=count)


@pytest.mark.usefixtures("small")
def test_every_pair_and_all_together() -> None:
    found = list(collectives.between(machine("gloo", "cpu", 3), PATIENT_S))
    assert sorted(each.check for each in found) == ["gloo 0-1", "gloo 0-2", "gloo 1-2", "gloo all"]
    assert all(each.status in ("ok", "warn") for each in found), found
    (alone,) = collectives.between(machine("gloo", "cpu", 1), PATIENT_S)
    assert alone.status == "ok"
    assert "group of one" in alone.message


@given(st.integers(2, 17))
def test_rounds_hold_every_pair_once(count: int) -> None:
    found = collectives.rounds(count)
    all_of_them = [pair for each in found for pair in each]
    assert sorted(all_of_them) == [(i, j) for i in range(count) for j in range(i + 1, count)]
    for each in found:
        assert len({device for pair in each for device in pair}) == 2 * len(each)


@given(st.integers(2, 8), st.floats(1e-6, 10.0))
def test_bus_bandwidth(size: int, seconds: float) -> None:
    """It is what each of the other formulas for a bus gives: n / t for two ranks, near 2 n / t for many."""
    ranks = [Child(1, value={1 << 20: seconds})] * size
    found = collectives.outcome("gloo", "ranks", Group("gloo", size, 5.0, 0), ranks)
    rate = (1 << 20) / seconds * 2 * (size - 1) / size / 1e9
    assert found.numbers["bus_gb_per_s_1048576"] == pytest.approx(rate, abs=1e-4)
    assert f"1 MiB {rate:.2f}" in found.message


@pytest.mark.usefixtures("small")
def test_the_slowest_rank_s_time_counts_on_all() -> None:
    _, (one, other) = collectives.on_host("gloo", ("cpu", "cpu"), PATIENT_S)
    assert one.value == other.value
    assert list(one.value) == list(SMALL)
    assert one.value[SMALL[0]] > 0


@pytest.mark.parametrize("cure", ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"])
def test_a_pair_of_gpus_is_tried_by_another_way(cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host where peer-to-peer copies hang would behave; the ranks themselves are stood in for."""
    tried: list[Mapping[str, str]] = []

    def start(backend: str, names: Sequence[str], seconds: float, environ: Mapping[str, str]) -> Started:
        tried.append(environ)
        group = Group(backend, len(names), seconds, 0, environ=environ)
        if environ.get(cure):
            return group, [Child(1, value={1 << 20: 0.001}) for _ in names]
        return group, [Child(100 + rank, stage="in an all-reduce of 64 KiB over nccl") for rank in range(len(names))]

    monkeypatch.setattr(collectives, "on_host", start)
    found = collectives.two(machine("nccl", "cuda", 2), (0, 1), 5.0, {"PATH": "x"})
    assert found.status == "fail"
    assert "cuda:0 and cuda:1: no end in 5 s: rank 0 (pid 100) in an all-reduce of 64 KiB over nccl" in found.message
    assert found.remedy.startswith(f"With {cure}=1 it works: set that for the run.")
    assert tried[0] == {"PATH": "x"}


def test_a_pair_that_nothing_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(backend: str, names: Sequence[str], seconds: float, environ: Mapping[str, str]) -> Started:
        log = "host:1:2 [0] misc/socket.cc:1 NCCL WARN Bootstrap : no socket interface found\n"
        group = Group(backend, len(names), seconds, 0, environ=environ)
        return group, [Child(1, "meeting", error="DistBackendError: internal error", log=log) for _ in names]

    monkeypatch.setattr(collectives, "on_host", start)
    found = collectives.two(machine("nccl", "cuda", 2), (0, 1), 5.0, {"NCCL_SOCKET_IFNAME": "nowhere"})
    assert "internal error (Bootstrap : no socket interface found)" in found.message
    assert found.remedy == "Unset NCCL_SOCKET_IFNAME (nowhere), or name an interface that is up."


def test_a_slow_bus_is_a_warning() -> None:
    ranks = [Child(1, value={16 << 20: 10.0})] * 2
    assert collectives.outcome("gloo", "2 ranks", Group("gloo", 2, 5.0, 0), ranks).status == "warn"


def test_what_a_process_gave_left_and_printed() -> None:
    one, other = children.run([(prints,), (quiet, 0.0)], PATIENT_S, {**os.environ, "ONLY_HERE": "yes"})
    assert (one.value, one.log, one.well) == ("yes", "from C\n", True)
    assert (other.value, other.stage) == (0.0, "sleeping")


def test_a_deadline_and_an_end_without_a_word() -> None:
    (late,) = children.run([(quiet, 600.0)], 0.2)
    assert (late.value, late.error, late.stage, late.well) == (None, "", "sleeping", False)
    # nobody waits an hour for the other one
    gone, alone = within(PATIENT_S, children.run, [(leaves,), (quiet, 3600.0)], 3600.0)
    assert gone.error == "died with exit code 7"
    assert not alone.well
    assert not alone.error


@pytest.mark.gpu
def test_the_gpus_of_this_machine() -> None:
    import torch

    for found in collectives.between(machine("nccl", "cuda", torch.accelerator.device_count()), 120.0):
        assert found.status == "ok", found
