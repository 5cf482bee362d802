"""kill -9 before any system call of a write: a good checkpoint is there each time."""

import os
import random
import re
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.restore import newest, restore
from lockstep.checkpoint.store import folder_name, list_checkpoints, tidy
from lockstep.checkpoint.writer import Writer
from tests.checkpoint.moments import bits, good, keep, tiny
from tests.ranks import _CONTEXT

LONG_DEADLINE_S = 60
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.fsync")


def die_at(folder: Path, value: float, fatal: int, pipe: Connection) -> None:
    """Write step 3 over those of 1 and 2, and die before the system call of number `fatal` on files; -1: never."""
    seen: list[str] = []

    def note(call: str, args: tuple[object, ...]) -> None:
        if call not in CALLS or (call == "open" and str(folder) not in str(args[0])):
            return
        if len(seen) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(f"{call} {' '.join(map(str, args[:2]))}")

    sync = os.fsync

    def noted(fd: Any) -> None:
        note("os.fsync", (fd,))
        sync(fd)

    os.fsync = noted
    writer = Writer(folder, keep=2)
    sys.addaudithook(note)
    writer.save(3, *tiny(value), state={"value": value})
    writer.close()
    pipe.send(seen)


def save_until_killed(folder: Path, pipe: Connection) -> None:
    """Checkpoint after checkpoint, each reported when it is on the device; every third replaces the one before."""
    loaded = newest(folder)
    first = loaded.step + 1 if loaded else 1
    writer = Writer(folder, keep=2)
    for count in range(10_000):
        step = first + count - count // 3
        writer.save(step, *tiny(step), state={"value": step})
        writer.close()
        pipe.send(step)


def written(folder: Path, value: float, fatal: int = -1) -> list[str]:
    """The calls of a write; none where it was killed."""
    here, there = _CONTEXT.Pipe()
    child = _CONTEXT.Process(target=die_at, args=(folder, value, fatal, there))
    child.start()
    there.close()
    calls = list[str]() if fatal >= 0 else here.recv()
    child.join(LONG_DEADLINE_S)
    assert child.exitcode == (-signal.SIGKILL if fatal >= 0 else 0)
    return calls


def recovered(folder: Path) -> tuple[int, float]:
    """What a new process finds: step and value of the newest good checkpoint, which must be all of one piece."""
    before = set(list_checkpoints(folder))
    tidy(folder)
    assert before <= set(list_checkpoints(folder)), "tidying takes no checkpoint away"
    loaded = good(folder)
    assert loaded.set_aside == (), "what has its name is whole: nothing had to be set aside"
    net, optimizer = tiny(-1)
    value = restore(loaded, net, optimizer)["value"]
    same_net, same_optimizer = tiny(value)
    assert bits(net.state_dict()) == bits(same_net.state_dict())
    assert bits(optimizer.state_dict()) == bits(same_optimizer.state_dict())
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return loaded.step, value


def assert_survives_a_kill_at_any_call(folder: Path, steps: tuple[int, ...], value: float, every: int) -> None:
    """With checkpoints of these steps there: before each rename and fsync of a write, and every so many other calls."""

    def fresh(name: str) -> Path:
        for step in steps:
            keep(folder / name, step)
        return folder / name

    calls = written(fresh("whole"), value)
    (renamed,) = (k for k, call in enumerate(calls) if re.search(rf"os.rename .*writing-.*/{folder_name(3)}$", call))
    assert len(calls) > 20
    assert {call.split()[0] for call in calls} == set(CALLS)
    for fatal, call in enumerate(calls):
        if fatal % every and not call.startswith(("os.rename", "os.fsync")):
            continue
        place = fresh(str(fatal))
        written(place, value, fatal)
        assert recovered(place) == ((3, value) if fatal > renamed else (steps[-1], steps[-1])), call
        keep(place, 3)
        assert recovered(place) == (3, 3)


@pytest.mark.parametrize("steps", [(1, 2), (2, 3)], ids=["writing", "replacing"])
@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_call(tmp_path: Path, steps: tuple[int, ...], every: int) -> None:
    assert_survives_a_kill_at_any_call(tmp_path, steps, 33.0, every)


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
        assert folder_name(last) in {path.name for path in folder.iterdir()}
    return last


@pytest.mark.parametrize("times", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path: Path, times: int) -> None:
    assert kill_at_random(tmp_path / "c", times, seed=times) >= 0.6 * times
