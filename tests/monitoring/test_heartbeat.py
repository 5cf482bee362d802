"""A rank that stops, sleeps, loses its loader or skips a collective is named in time; a slow run is left alone."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from lockstep.config import Execution
from lockstep.data.loaders import streaming
from lockstep.distributed.warm import prepare
from lockstep.distributed.world import World, join
from lockstep.errors import EXIT_HANG
from lockstep.monitoring.heartbeat import REPORT, Heartbeat, run_store
from lockstep.monitoring.journal import FaultRecord
from lockstep.parallel.strategy import parallelize
from tests.ranks import _CONTEXT

TIMEOUT = 2.0
LIMIT = TIMEOUT + 5  # what a report may take from the fault on
DEADLINE = 60.0  # of a test's processes

Scenario = Callable[[World, Heartbeat, Path], None]


@dataclass(frozen=True)
class Outcome:
    """What became of the ranks."""

    codes: list[int | None]  # None: had to be killed
    said: str  # on all ranks' stderr
    details: str  # the report file
    records: list[dict[str, Any]]
    seconds: float  # from the fault to the report


def process(scenario: Scenario, env: dict[str, str], folder: Path) -> None:
    os.environ.update(env)
    prepare()
    rank = env["RANK"]
    sys.stderr = (folder / f"stderr-{rank}").open("w", encoding="utf-8")

    def note(record: FaultRecord) -> None:
        (folder / f"record-{rank}.json").write_text(json.dumps(record), encoding="utf-8")

    with (
        join(Execution(device="cpu", threads=1, collective_timeout=DEADLINE)) as world,
        Heartbeat(world, run_store(world), TIMEOUT, folder, note) as beat,
    ):
        scenario(world, beat, folder)


@dataclass(frozen=True)
class Run:
    """A scenario on n ranks. `fault` gets the processes once the file `ready` is there.

    Without it the scenario has a fault of its own, and the file tells when. `stuck` ranks won't end by themselves.
    """

    scenario: Scenario
    n: int
    fault: Callable[[list[Any]], None] | None = None
    store_in_rank_0: bool = False
    stuck: int = 0

    def steps(self, folder: Path) -> Generator[None, None, Outcome]:
        """Start it, and give way where there is nothing to do but wait."""
        store, port = None, 0
        if self.store_in_rank_0:
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                port = probe.getsockname()[1]
        else:
            patience = timedelta(seconds=DEADLINE)
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=patience)
            port = store.port
        n = str(self.n)
        env = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        env["TORCHELASTIC_USE_AGENT_STORE"] = str(store is not None)
        ranks = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.n)]
        processes = [_CONTEXT.Process(target=process, args=(self.scenario, mine, folder)) for mine in ranks]
        for one in processes:
            one.start()
        deadline = time.monotonic() + DEADLINE
        try:
            if self.fault is not None:
                while not (folder / "ready").exists():
                    assert time.monotonic() < deadline
                    yield
                self.fault(processes)
                (folder / "ready").touch()
            while sum(one.exitcode is None for one in processes) > self.stuck and time.monotonic() < deadline:
                yield
            codes = [one.exitcode for one in processes]
        finally:
            for one in processes:
                one.kill()
                one.join()
        report = folder / REPORT
        return Outcome(
            codes,
            "".join(path.read_text() for path in sorted(folder.glob("stderr-*"))),
            report.read_text() if report.exists() else "",
            [json.loads(path.read_text()) for path in sorted(folder.glob("record-*.json"))],
            report.stat().st_mtime - (folder / "ready").stat().st_mtime if report.exists() else -1.0,
        )


class Runs:
    """The runs of all tests that were asked for, four at a time: what they mostly do is wait."""

    def __init__(self, folders: dict[Run, Path]) -> None:
        self.going = {run: run.steps(folder) for run, folder in folders.items()}
        self.over: dict[Run, Outcome | Exception] = {}

    def outcome(self, run: Run) -> Outcome:
        while run not in self.over:
            for each in list(self.going)[:4]:
                try:
                    next(self.going[each])
                except StopIteration as end:
                    self.over[each] = end.value
                except Exception as error:
                    self.over[each] = error
                if each in self.over:
                    del self.going[each]
            time.sleep(0.02)
        found = self.over[run]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        for steps in self.going.values():
            steps.close()


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    items = (item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function))
    asked = [cast(Run, item.callspec.params["found"]) for item in items if "found" in item.fixturenames]
    with contextlib.closing(Runs({run: tmp_path_factory.mktemp("run") for run in asked})) as all_of_them:
        yield all_of_them


@pytest.fixture
def found(request: pytest.FixtureRequest, runs: Runs) -> Outcome:
    """What became of the test's run, its parameter."""
    return runs.outcome(request.param)


def of(*args: Any, **options: Any) -> pytest.MarkDecorator:
    """Give a test the outcome of this Run."""
    return pytest.mark.parametrize("found", [Run(*args, **options)], indirect=True, ids=[args[0].__name__])


def reported(found: Outcome, rank: int, *words: str) -> None:
    """One report, in time, that names the rank and says these words."""
    assert found.said.count("hangs at step") == 1, found.said
    assert 0 < found.seconds < LIMIT
    assert [record["ranks"] for record in found.records] == [[rank]], found.said
    for word in words:
        assert word in found.said, found.said
    first = found.details.split("\n\n")[0]
    assert first in found.said


def train(world: World, beat: Heartbeat, folder: Path, at_step: Callable[[int], None] = lambda step: None) -> None:
    """A training loop that would take minutes."""
    model = parallelize(nn.Linear(4, 4), world)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(10_000):
        beat.at(step, "loader")
        at_step(step)
        beat.at(step, "forward-backward")
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        if step == 20 and world.rank == 0:
            (folder / "ready").touch()
        time.sleep(0.01)


def only_train(world: World, beat: Heartbeat, folder: Path) -> None:
    train(world, beat, folder)


def stop(rank: int) -> Callable[[list[Any]], None]:
    return lambda processes: os.kill(processes[rank].pid, signal.SIGSTOP)


@of(only_train, 3, stop(0))
def test_a_stopped_rank(found: Outcome) -> None:
    reported(
        found, 0,
        "rank 0 (pid ", "is silent at step", "its process is stopped by a signal (SIGSTOP, Ctrl-Z)",
        "ranks 1, 2 wait for rank 0", "rank 1  step ", "in the backward pass, with its all-reduces", "collectives",
    )  # fmt: skip
    assert found.codes[1:] == [EXIT_HANG] * 2
    assert found.codes[0] in (EXIT_HANG, 1)  # it was woken to leave, unless it sees first that the others have left
    assert "_engine_run_backward" in found.details


@of(only_train, 3, stop(0), store_in_rank_0=True, stuck=1)
def test_the_rank_that_holds_the_store_stopped(found: Outcome) -> None:
    assert found.said.count("hangs at step") >= found.codes.count(EXIT_HANG)  # or it sees first that the other has left
    assert found.codes in ([None, EXIT_HANG, EXIT_HANG], [None, EXIT_HANG, 1], [None, 1, EXIT_HANG])
    assert "the store where the ranks meet is lost: it does not answer" in found.said
    # what the others last heard of rank 0 depends on how far it was at their last look
    assert re.search(r"rank 0 \(pid \d+ on \S+\) is silent at [^;]*: its process is stopped by a signal", found.said)
    assert found.seconds < LIMIT


def skip_a_collective(world: World, beat: Heartbeat, folder: Path) -> None:
    for step in range(10):
        beat.at(step, "forward-backward")
        if step == 5 and world.rank == 2:
            (folder / "ready").touch()
        else:
            world.sum(torch.ones(3))
    world.barrier()
    world.sum(torch.ones(5))


@of(skip_a_collective, 3)
def test_a_rank_that_skips_a_collective(found: Outcome) -> None:
    reported(found, 2, "rank 2 skipped a collective", "ranks 0, 1 wait for rank 2")
    assert found.codes == [EXIT_HANG] * 3


class SleepyImages:
    """Images whose 6th request never ends, on one rank."""

    name, classes, shape, mean, std, fingerprint = "sleepy", ("a", "b"), (1, 2, 2), (0.5,), (0.5,), ""

    def __init__(self, sleepy: bool) -> None:
        self.sleepy, self.asked = sleepy, 0

    def __len__(self) -> int:
        return 1000

    def read(self, ids: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        self.asked += 1
        while self.sleepy and self.asked > 5:
            self.dream()
        return torch.zeros(len(ids), 1, 2, 2, dtype=torch.uint8), torch.zeros(len(ids), dtype=torch.int64)

    def dream(self) -> None:
        time.sleep(1)


def lose_the_loader(world: World, beat: Heartbeat, folder: Path) -> None:
    with beat.long_phase("start"):  # worker processes import torch
        was_read = streaming(SleepyImages(world.rank == 1), world.device, 1)((np.arange(4), 0) for _ in range(100))
        next(was_read)
    beat.at(1, "loader")
    for step, _ in enumerate(was_read, 2):
        (folder / "ready").touch()
        beat.at(step, "forward-backward")
        world.sum(torch.ones(3))
        beat.at(step, "loader")


@of(lose_the_loader, 2)
def test_a_loader_whose_worker_sleeps(found: Outcome) -> None:
    reported(found, 1, "rank 1 waits for its loader at step 5", "is sleeping", "rank 0 waits for rank 1", "all_reduce")
    assert "is sleeping" in found.records[0]["cause"]
    assert found.codes == [EXIT_HANG] * 2


def sleep_in_python(world: World, beat: Heartbeat, folder: Path) -> None:
    def at_step(step: int) -> None:
        while world.rank == 1 and step == 7:
            if not (folder / "ready").exists():  # its time is the fault's
                (folder / "ready").touch()
            time.sleep(0.1)

    train(world, beat, folder, at_step)


def hold_the_interpreter(world: World, beat: Heartbeat, folder: Path) -> None:
    def at_step(step: int) -> None:
        if world.rank == 1 and step == 7:
            (folder / "ready").touch()
            sum(itertools.repeat(1))  # endless, and it keeps the interpreter's lock

    train(world, beat, folder, at_step)


@of(sleep_in_python, 3)
def test_a_rank_that_sleeps_in_python(found: Outcome) -> None:
    reported(found, 1, "rank 1 ", "at step 7", "at_step (monitoring/test_heartbeat.py:", "ranks 0, 2 wait for rank 1")
    assert found.codes == [EXIT_HANG] * 3


@of(hold_the_interpreter, 2, stuck=1)
def test_a_rank_whose_interpreter_is_held(found: Outcome) -> None:
    reported(found, 1, "rank 1 (pid ", "is silent at step ", "its process is running", "rank 0 waits for rank 1")
    assert found.codes == [EXIT_HANG, None]


def alone_and_asleep(world: World, beat: Heartbeat, folder: Path) -> None:
    beat.at(3, "loader")
    (folder / "ready").touch()
    time.sleep(1000)


@of(alone_and_asleep, 1)
def test_a_world_of_one(found: Outcome) -> None:
    reported(found, 0, "rank 0 waits for its loader at step 3", "alone_and_asleep")
    assert found.codes == [EXIT_HANG]


def slow_and_well(world: World, beat: Heartbeat, folder: Path) -> None:
    for step, share in enumerate((0.1, 0.6, 0.05, 0.7)):
        beat.at(step, "forward-backward")
        if world.rank == step % world.size:
            time.sleep(share * TIMEOUT)
        world.sum(torch.ones(3))
    with contextlib.ExitStack() as stack:
        if world.rank == 1:  # the others, who have announced nothing, wait for it
            stack.enter_context(beat.long_phase("a download"))
            time.sleep(1.8 * TIMEOUT)
    world.barrier()
    if world.rank == 1:  # evaluation: no collective, and others that are long done
        beat.close()
        time.sleep(1.5 * TIMEOUT)
    for _ in range(10):
        beat.at(4, "evaluation")
        time.sleep(0.15 * TIMEOUT)
    beat.close()
    world.barrier()


def interrupted(world: World, beat: Heartbeat, folder: Path) -> None:
    for step in range(20):
        beat.at(step, "forward-backward")
        world.sum(torch.ones(3))
        if step == 10 and world.rank == 0:
            (folder / "ready").touch()
        for _ in range(12 if step == 10 else 1):  # one long sleep would be over when the process comes back
            time.sleep(0.06)


def suspend_all(processes: list[Any]) -> None:
    time.sleep(0.5)  # so that they have looked at this step once
    for number, pause in ((signal.SIGSTOP, 1.5 * TIMEOUT), (signal.SIGCONT, 0.0)):
        for one in processes:
            os.kill(one.pid, number)
        time.sleep(pause)


@pytest.mark.parametrize(
    "found",
    [pytest.param(Run(slow_and_well, 3), marks=pytest.mark.slow), Run(interrupted, 3, suspend_all)],
    indirect=True,
    ids=["slow_and_well", "interrupted"],
)
def test_no_false_alarm(found: Outcome) -> None:
    assert found.codes == [0, 0, 0], found.said
    assert found.said == ""
    assert not found.records


def test_zero_seconds_watch_nothing() -> None:
    with Heartbeat(World.single(), None, 0.0) as beat, beat.long_phase("nothing"):
        beat.at(1, "loader")
        assert not beat._threads
