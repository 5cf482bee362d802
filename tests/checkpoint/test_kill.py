"""kill -9 at every phase of a write: a good checkpoint is there each time."""

import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lockstep.checkpoint.restore import restore
from lockstep.checkpoint.store import name_of, steps, tidy
from lockstep.checkpoint.verified import newest
from lockstep.checkpoint.writer import Writer
from tests.checkpoint.moments import bits, keep, tiny
from tests.ranks import _CONTEXT

# the checkpoint of step 3 over those of 1 and 2, of which 1 is pruned; `replace` needs one of step 3 before
PHASES = (
    "begin", "model.safetensors", "model.safetensors half", "optimizer.safetensors", "optimizer.safetensors half",
    "state.json", "manifest.json", "sync", "rename", "sync parent", "end", "prune", "pruned",
)  # fmt: skip
REPLACING = ("rename", "replace", "sync parent", "end")
LONG_DEADLINE_S = 60


def die_at(folder: Path, step: int, value: float, fatal: str) -> None:
    def at(phase: str) -> None:
        if phase == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    writer = Writer(folder, keep=2, at=at)
    writer.save(step, *tiny(value), state={"value": value})
    writer.close()


def save_until_killed(folder: Path, pipe: Connection) -> None:
    """Checkpoint after checkpoint, each told of when it is on the device; every third replaces the one before."""
    loaded = newest(folder)
    first = loaded.step + 1 if loaded else 1
    writer = Writer(folder, keep=2)
    for count in range(10_000):
        step = first + count - count // 3
        writer.save(step, *tiny(step), state={"value": step})
        writer.close()
        pipe.send(step)


def killed(*args: object) -> None:
    child = _CONTEXT.Process(target=die_at, args=args)
    child.start()
    child.join(LONG_DEADLINE_S)
    assert child.exitcode == -signal.SIGKILL


def recovered(folder: Path) -> tuple[int, float]:
    """What a new process finds: step and value of the newest good checkpoint, which must be all of one piece."""
    before = set(steps(folder))
    tidy(folder)
    assert before <= set(steps(folder)), "tidying takes no checkpoint away"
    loaded = newest(folder)
    assert loaded is not None
    assert loaded.set_aside == (), "what has its name is whole: nothing had to be set aside"
    net, optimizer = tiny(-1)
    value = restore(loaded, net, optimizer)["value"]
    same_net, same_optimizer = tiny(value)
    assert bits(net.state_dict()) == bits(same_net.state_dict())
    assert bits(optimizer.state_dict()) == bits(same_optimizer.state_dict())
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return loaded.step, value


def assert_survives_a_kill_while_writing(folder: Path, phase: str) -> None:
    for step in (1, 2):
        keep(folder, step)
    killed(folder, 3, 3.0, phase)
    renamed = PHASES.index(phase) > PHASES.index("rename")
    assert recovered(folder) == ((3, 3.0) if renamed else (2, 2))
    keep(folder, 3)
    assert recovered(folder) == (3, 3)


def assert_survives_a_kill_while_replacing(folder: Path, phase: str) -> None:
    for step in (2, 3):
        keep(folder, step)
    killed(folder, 3, 33.0, phase)
    assert recovered(folder) == (3, 33.0 if phase in ("sync parent", "end") else 3)


@pytest.mark.parametrize("phase", PHASES)
def test_killed_while_writing(tmp_path: Path, phase: str) -> None:
    assert_survives_a_kill_while_writing(tmp_path / "c", phase)


@pytest.mark.parametrize("phase", REPLACING)
def test_killed_while_replacing(tmp_path: Path, phase: str) -> None:
    assert_survives_a_kill_while_replacing(tmp_path / "c", phase)


def test_these_are_all_phases(tmp_path: Path) -> None:
    seen: list[str] = []
    for step in (1, 2, 3, 3):
        writer = Writer(tmp_path, keep=2, at=seen.append)
        writer.save(step, *tiny(step))
        writer.close()
    assert set(seen) == {*PHASES, *REPLACING}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_killed_while_writing_many_times(tmp_path: Path, phase: str) -> None:
    for number in range(10):
        assert_survives_a_kill_while_writing(tmp_path / str(number), phase)


def kill_at_random(folder: Path, times: int, seed: int) -> int:
    """Kill a process that saves without end, `times` times; returns the last step that was good."""
    rng, last = random.Random(seed), 0
    keep(folder, 0)
    for _ in range(times):
        here, there = _CONTEXT.Pipe()
        child = _CONTEXT.Process(target=save_until_killed, args=(folder, there))
        child.start()
        there.close()
        told = last
        for _ in range(rng.randrange(1, 4)):
            assert here.poll(LONG_DEADLINE_S)
            told = here.recv()
        here.poll(rng.random() * 0.02)
        child.kill()
        child.join(LONG_DEADLINE_S)
        while True:
            try:
                told = here.recv()
            except EOFError:
                break
        here.close()
        last, value = recovered(folder)
        assert value == last >= told, "what was told of as on the device is there"
        assert name_of(last) in {path.name for path in folder.iterdir()}
    return last


def test_killed_at_a_random_moment(tmp_path: Path) -> None:
    assert kill_at_random(tmp_path / "c", 5, seed=0) >= 3


@pytest.mark.slow
def test_killed_at_random_moments_a_hundred_times(tmp_path: Path) -> None:
    assert kill_at_random(tmp_path / "c", 100, seed=1) >= 60
