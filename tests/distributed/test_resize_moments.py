"""Resizes at each moment of one run: while it starts, evaluates, writes a checkpoint, is started again."""

import os
import signal
from pathlib import Path

import pytest

from lockstep.distributed.resize import REQUEST
from tests.distributed.test_resize import ENDLESS, FLAGS, SAME, compared, handed_over, kinds, resize, starting, stepping
from tests.subprocesses import Command, lockstep

# a model of the user's, which keeps an evaluation or a write of a checkpoint going while a file says so
_NETS = """
import time
from pathlib import Path
from torch import nn
from lockstep.checkpoint import writer

def held(what):
    while Path(f"hold-{what}").exists():
        Path(f"reached-{what}").touch()
        time.sleep(0.005)

class Net(nn.Sequential):
    def forward(self, images):
        if not self.training:
            held("evaluation")
        elif Path("hold-checkpoint").exists():
            time.sleep(0.01)  # no other checkpoint shall come while that is written
        return super().forward(images)

def net():
    return Net(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

def write(*args, **kwargs):
    held("checkpoint")
    return writer.plain_write(*args, **kwargs)

if not hasattr(writer, "plain_write"):
    writer.plain_write, writer.write = writer.write, write
"""


def asked_at(command: Command, place: Path, what: str, nproc: int) -> None:
    """Ask for another number in the midst of an evaluation or of a checkpoint's writing, which then goes on."""
    (place / f"hold-{what}").touch()
    command.until((place / f"reached-{what}").is_file, 120)
    resizes = len(kinds(place / "run", "resize"))
    asking = lockstep("resize", "run", "--nproc", str(nproc), cwd=place)
    command.until((place / "run" / REQUEST).is_file, 120)
    if what == "checkpoint":  # steps are taken meanwhile, at whose boundaries the request is found
        steps = len(kinds(place / "run", "step"))
        command.until(lambda: len(kinds(place / "run", "step")) > steps + 10, 120)
    assert len(kinds(place / "run", "resize")) == resizes, "it waits"
    (place / f"hold-{what}").unlink()
    ended = asking.end(120)
    assert (ended.code, ended.orphans) == (0, ()), ended.text
    assert f" -> {nproc} processes at step " in ended.out


def lose_a_rank(command: Command) -> None:
    """Kill one, and return when the launcher begins to start them again."""

    def restarts() -> int:
        return os.pread(command.err.fileno(), 1 << 20, 0).count(b"; restart ")

    before = restarts()
    command.signal(signal.SIGKILL, command.workers()[-1])
    command.until(lambda: restarts() > before, 120)


@pytest.mark.slow(30)
def test_resizes_at_every_moment_change_no_bit(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(_NETS)
    exact = ["--model", "nets:net", "--exact", "5", "--batch-size", "60", "--ema", "0.9", "--max-restarts", "9"]
    exact += ["--checkpoint-every", "300steps", "--eval-every", "5"]
    folder, before = tmp_path / "run", handed_over()
    command = lockstep(*FLAGS, *ENDLESS, *exact, "--nproc", "2", cwd=tmp_path)
    starting(command, folder)
    assert "2 -> 5 processes at step " in resize(tmp_path, 5)
    for what, nproc in (("evaluation", 2), ("checkpoint", 4)):
        stepping(command, folder)
        asked_at(command, tmp_path, what, nproc)
        stepping(command, folder)
        assert f"{nproc} -> 5 processes at step " in resize(tmp_path, 5)
    for nproc in (3, 1):
        stepping(command, folder)
        lose_a_rank(command)
        assert f" -> {nproc} processes at step " in resize(tmp_path, nproc)
    mine, straight, printed = compared(command, tmp_path, tuple(exact))
    assert {name: mine[name] for name in SAME} == {name: straight[name] for name in SAME}
    assert printed.count("; restart ") == 2
    assert handed_over() <= before
