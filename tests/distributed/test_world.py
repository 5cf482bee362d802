"""Who am I: torn environments, devices that are not there; and how ranks talk."""

import dataclasses
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lockstep.config import Execution
from lockstep.distributed.environment import launcher_ranks
from lockstep.distributed.proc import cores
from lockstep.distributed.world import World, join, pretended_rank
from lockstep.errors import PeerError, UserError
from tests.ranks import run_ranks
from tests.subprocesses import Command

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
WHOLE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# The environment


def test_a_whole_environment_is_joined_and_an_empty_one_is_not() -> None:
    assert launcher_ranks(WHOLE)
    assert not launcher_ranks({})
    assert not launcher_ranks({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}), "often exported for other programs"
    assert not launcher_ranks({**dict.fromkeys(WHOLE, ""), "PATH": "/bin"}), "empty is unset"


@pytest.mark.parametrize("missing", WHOLE)
def test_an_environment_with_one_variable_missing_is_torn(missing: str) -> None:
    with pytest.raises(UserError, match=f"half a launcher environment: .* set, {missing} not") as caught:
        launcher_ranks({name: value for name, value in WHOLE.items() if name != missing})
    assert "lockstep train --nproc N" in caught.value.remedy


@pytest.mark.parametrize("only", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_one_variable_alone_is_torn_and_the_remedy_names_it(only: str) -> None:
    with pytest.raises(UserError, match=f"half a launcher environment: {only} set") as caught:
        launcher_ranks({only: WHOLE[only], "PATH": "/bin"})
    assert f"unset {only}." in caught.value.remedy


@pytest.mark.parametrize(
    "changed",
    [
        {"RANK": "4"},
        {"RANK": "0"},  # behind its own local rank
        {"LOCAL_RANK": "2"},
        {"LOCAL_WORLD_SIZE": "5"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "0", "RANK": "0", "LOCAL_RANK": "0"},
    ],
    ids=str,
)
def test_contradictions_are_named(changed: dict[str, str]) -> None:
    with pytest.raises(UserError, match="a contradictory launcher environment: RANK=") as caught:
        launcher_ranks(WHOLE | changed)
    assert all(f"{name}={value}" in caught.value.message for name, value in changed.items())


@pytest.mark.parametrize("value", ["one", "-1", "1.0", "²", "0x1"])
@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT"])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"not a number: {name}={value}"):
        launcher_ranks(WHOLE | {name: value})


def test_a_world_of_one_needs_no_process_group() -> None:
    alone = dict.fromkeys(WHOLE, "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for environ in ({}, alone):
        with join(Execution(device="cpu", threads=1), environ) as world:
            assert world == World.single()
            assert not torch.distributed.is_initialized()
            assert torch.get_num_threads() == 1
    with join(Execution(device="cpu"), {}):
        assert torch.get_num_threads() == cores()


@pytest.mark.parametrize("port", ["closed", "0", "99999"])
def test_a_meeting_that_nobody_comes_to_ends_in_an_error(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as bound:
        bound.bind(("localhost", 0))  # bound and not listening: nobody answers there
        port = str(bound.getsockname()[1]) if port == "closed" else port
        for name, value in (WHOLE | {"MASTER_PORT": port}).items():
            monkeypatch.setenv(name, value)  # torch reads the process's own environment
        with pytest.raises(UserError, match=f"rank 1 of 4 could not meet the others at localhost:{port}") as caught:
            join(Execution(device="cpu", threads=1, collective_timeout=1.0)).__enter__()
    assert "expected, but not set" not in caught.value.message
    assert "port is free and open" in caught.value.remedy


# Talking


def refuse(*_: Any) -> Any:
    raise AssertionError("a collective unpickles")


def talk(world: World, folder: str) -> dict[str, Any]:
    setattr(dist.distributed_c10d, "_tensor_to_object", refuse)  # noqa: B010
    found: dict[str, Any] = {"identity": (world.rank, world.size, world.local_rank, world.local_size, world.backend)}
    tensor = torch.tensor([world.rank, 1])
    found["same object"] = world.sum(tensor) is tensor
    found["sum"] = tensor.tolist()
    found["gathered"] = world.gather({"rank": world.rank, "text": "é" * world.rank * 900})
    found["numbers"] = world.gather([None, 0.1, float("inf")])
    found["share"] = [range(n)[world.shard(n)] for n in (0, 1, 5, 8)]
    world.barrier()
    found["threads"] = torch.get_num_threads()

    # two hosts: local rank 0 of each goes first
    host = world.rank // 2
    pair = dataclasses.replace(world, local_rank=world.rank % 2, local_size=2)
    done = Path(folder) / f"host{host}"
    with pair.first_on_host():
        found["came to"] = done.exists()
        if pair.local_rank == 0:
            time.sleep(0.1 + 0.1 * host)
            done.touch()

    # a first rank that fails
    failing = dataclasses.replace(world, local_rank=world.rank, local_size=world.size)
    entered = False
    try:
        with failing.first_on_host():
            entered = True
            if world.rank == 0:
                raise UserError("checksum", "again")
    except (UserError, PeerError) as error:
        found["failure"] = (type(error).__name__, str(error), entered)

    # one host of two fails: the other's ranks stop as well
    try:
        with pair.first_on_host():
            if world.rank == 2:
                raise UserError("disk full")
            found["worked on"] = True
    except (UserError, PeerError) as error:
        found["other host"] = (type(error).__name__, str(error))
    world.barrier()  # and nobody is out of step
    return found


def test_ranks_talk(tmp_path: Path) -> None:
    ranks = run_ranks(talk, 4, str(tmp_path))
    for number, rank in enumerate(ranks):
        assert rank["identity"] == (number, 4, number, 4, "gloo")
        assert rank["sum"] == [6, 4]
        assert rank["same object"]
        assert rank["gathered"] == [{"rank": i, "text": "é" * i * 900} for i in range(4)]
        assert rank["numbers"] == [[None, 0.1, float("inf")]] * 4
        assert rank["threads"] == 1
        assert rank["came to"] == (number % 2 == 1), "the first on a host works, the others find the work done"
    for position, n in enumerate((0, 1, 5, 8)):
        assert [i for rank in ranks for i in rank["share"][position]] == list(range(n))
    failures, lost = [rank["failure"] for rank in ranks], ("PeerError", "rank 2 failed")
    assert failures == [("UserError", "checksum\n  again", True), *[("PeerError", "rank 0 failed", False)] * 3]
    assert [rank["other host"] for rank in ranks] == [lost, lost, ("UserError", "disk full"), lost]
    assert ["worked on" in rank for rank in ranks] == [True, False, False, False]


def test_alone_nothing_is_awaited(capsys: pytest.CaptureFixture[str]) -> None:
    world = World.single()
    tensor = torch.ones(2)
    assert world.sum(tensor) is tensor
    assert world.gather("x") == ["x"]
    with pytest.raises(UserError, match=r"world.gather: Object of type Identity is not JSON serializable"):
        world.gather(torch.nn.Identity())
    world.barrier()
    with world.first_on_host():
        world.print("a", 1)
    with pytest.raises(UserError, match="itself"), world.first_on_host():
        raise UserError("itself")
    dataclasses.replace(world, rank=1, size=2).print("not from here")
    assert capsys.readouterr().out == "a 1\n"


def test_a_process_alone_may_pretend_to_be_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    hook = sys.excepthook
    for rank in (1, 0):
        with pytest.raises(ArithmeticError, match=f"{rank} of 3"):
            _fail_as(rank, 3)
        assert not dist.is_initialized()
        assert os.environ["RANK"] == "7"
        assert "WORLD_SIZE" not in os.environ
        assert sys.excepthook is hook


def _fail_as(rank: int, size: int) -> None:
    with mock.patch.object(dist, "init_process_group") as made, pretended_rank(rank, size):
        assert not made.called  # before a question: it would cost a check of a small model a third of its time
    with pretended_rank(rank, size):
        assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == [str(rank), str(rank), str(size)]
        dist.all_reduce(torch.ones(2))
        raise ArithmeticError(f"{dist.get_rank()} of {dist.get_world_size()}")


def _pretends(world: World) -> list[tuple[int, int] | float]:
    seen: list[tuple[int, int] | float] = []
    for _ in range(1 + world.rank):
        with pretended_rank(2, 5):
            dist.all_reduce(torch.ones(2))  # the others are not asked
            seen.append((dist.get_rank(), dist.get_world_size()))
    seen.append((dist.get_rank(), dist.get_world_size()))
    group, value = dist.new_group(), torch.ones(())
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(value, group=group)
    dist.all_reduce(value)
    return [*seen, float(value)]


def test_a_rank_may_pretend_to_be_another_one_and_is_itself_again() -> None:
    assert run_ranks(_pretends, 2) == [[(2, 5), (0, 2), 4.0], [(2, 5), (2, 5), (1, 2), 4.0]]


@pytest.mark.slow
def test_the_compiler_may_be_imported_first_by_a_rank_that_pretends() -> None:
    program = (
        "from lockstep.distributed.world import pretended_rank as r, dist, torch\nwith r(1, 2): import torch._dynamo"
    )
    assert Command(sys.executable, "-c", f"{program}; assert dist.get_rank() == 1").end(timeout=120).code == 0
