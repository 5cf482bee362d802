"""SIGUSR2 and resizes at each moment of one run: while it starts, evaluates, writes a checkpoint, is started again."""

import os
import signal
from pathlib import Path

import pytest

from tests.distributed.test_resize import ENDLESS, FLAGS, SAME, compared, handed_over, kinds, resize, starting, stepping
from tests.subprocesses import Command, lockstep

# a model of the user's, which keeps an evaluation or a write of a checkpoint going while a file says so
_NETS = """
import time
from pathlib import Path
from torch import nn
from lockstep.checkpoint import writer
from lockstep.distributed.signals import again

def held(what):
    while Path(f"hold-{what}").exists():
        Path(f"reached-{what}").touch()
        if again.waits:  # SIGUSR2 has come to this process
            Path(f"heard-{what}").touch()
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


def asked_at(command: Command, place: Path, what: str) -> None:
    """Send SIGUSR2 in the midst of an evaluation or of a checkpoint's writing, which then goes on."""
    before = command.said().count("SIGUSR2: goes on")
    (place / f"hold-{what}").touch()
    command.until((place / f"reached-{what}").is_file, 120)
    command.signal(signal.SIGUSR2)
    command.until((place / f"heard-{what}").is_file, 120)
    if what == "checkpoint":  # during which steps are taken: the run goes on elsewhere before it is written
        command.until(lambda: command.said().count("SIGUSR2: goes on") > before, 120)
    (place / f"hold-{what}").unlink(missing_ok=True)


def chosen(command: Command, folder: Path, before: int) -> int:
    """How many processes SIGUSR2 has led to, of 1 to 4: whatever else the machine does, it was five."""
    command.until(lambda: len(kinds(folder, "resize")) > before, 120)
    record = kinds(folder, "resize")[-1]
    assert (record["before"], 1 <= record["processes"] <= 4) == (5, True)
    return int(record["processes"])


def lose_a_rank(command: Command) -> None:
    """Kill one, and return when the launcher begins to start them again."""

    def restarts() -> int:
        return os.pread(command.err.fileno(), 1 << 20, 0).count(b"; restart ")

    before = restarts()
    command.signal(signal.SIGKILL, command.workers()[-1])
    command.until(lambda: restarts() > before, 120)


@pytest.mark.slow(30)
def test_sigusr2_at_every_moment_and_resizes_during_a_restart_change_no_bit(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(_NETS)
    exact = ["--model", "nets:net", "--exact", "5", "--batch-size", "60", "--ema", "0.9", "--max-restarts", "9"]
    exact += ["--checkpoint-every", "300steps", "--eval-every", "5"]
    folder, before = tmp_path / "run", handed_over()
    command = lockstep(*FLAGS, *ENDLESS, *exact, "--nproc", "1:4", cwd=tmp_path)
    starting(command, folder)
    command.signal(signal.SIGUSR2)
    command.until(lambda: "SIGUSR2: " in command.said(), 120)
    said = []
    for moment in ("evaluation", "checkpoint", "restart"):
        stepping(command, folder)
        said.append(resize(tmp_path, 5))
        stepping(command, folder)
        resizes = len(kinds(folder, "resize"))
        if moment == "restart":
            lose_a_rank(command)
            command.signal(signal.SIGUSR2)
        else:
            asked_at(command, tmp_path, moment)
        said.append(str(chosen(command, folder, resizes)))
    stepping(command, folder)
    resize(tmp_path, 5)
    stepping(command, folder)
    lose_a_rank(command)
    assert " -> 3 processes at step " in resize(tmp_path, 3)
    stepping(command, folder)
    for pid in command.family():  # of the machine's cores one is left to the run
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(pid))})
    resizes = len(kinds(folder, "resize"))
    command.signal(signal.SIGUSR2)
    command.until(lambda: len(kinds(folder, "resize")) > resizes, 120)
    assert kinds(folder, "resize")[-1]["processes"] == 1
    assert " of 1 core(s) busy (--nproc 1:4)" in command.said()
    mine, straight, printed = compared(command, tmp_path, tuple(exact))
    assert {name: mine[name] for name in SAME} == {name: straight[name] for name in SAME}
    assert printed.count("; restart ") == 2
    assert printed.count("SIGUSR2: goes on with ") >= 4
    assert handed_over() <= before
