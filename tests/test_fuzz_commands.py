"""Any command line, environment and folder: done, or exit code 2 with a sentence; no traceback, nothing left behind."""

import os
import random
import secrets
from pathlib import Path

import pytest

from lockstep.config import Config
from lockstep.config.fields import flag_names
from tests.subprocesses import run_lockstep

SMALL = ("--epochs", "1", "--fraction", "0.1", "--nproc", "1", "--threads", "1", "--out", "run")
VALUES = (
    "", "0", "1", "2", "-1", "1e18", "1e-9", "nan", "inf", "-inf", "0.5", "3,1", ",", "true", "none", "auto", "x", "é",
    "a b", "$(id)", "os:system", "a.b:c", ":", "..", "/", "/dev/null", "/dev/full", "fifo", "folder", "file", "x" * 300,
    "1" * 30, "0x10", "digits", "resnet18", "mlp", "sgd", "2steps", "1epoch", "lr,epochs",
)  # fmt: skip
COMMANDS = (
    *(("train", "digits", *SMALL),) * 6, ("train",), ("eval",), ("eval", "folder"), ("export", "folder"), ("show",),
    ("recipes",), ("launch-script", "slurm"), ("launch-script", "torchrun"), ("train", "folder"), ("train", "mnist"),
)  # fmt: skip
ENVIRONMENT = (
    "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MASTER_PORT", "MASTER_ADDR", "LOCKSTEP_DATA",
)  # fmt: skip
# that start hundreds of processes, wait for other machines or train for hours: accepted, and too long for a test
LONG = {"--nproc", "--nnodes", "--epochs", "--eval-every", "--collective-timeout", "--workers", "--max-restarts"}
FLAGS = sorted({*flag_names(Config)} - LONG)


def case(draw: random.Random) -> tuple[list[str], dict[str, str]]:
    """A command line and an environment."""
    arguments = [*draw.choice(COMMANDS)]
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        arguments.append(draw.choice(FLAGS))
        if draw.random() < 0.9:
            arguments.append(draw.choice(VALUES))
    if arguments == ["train"] or arguments[:2] == ["train", "--"]:
        arguments += SMALL
    environment = {draw.choice(ENVIRONMENT): draw.choice(VALUES[:-8]) for _ in range(draw.choice((0, 0, 0, 1, 2)))}
    return arguments, environment


def check(seed: int, cases: int, tmp_path: Path) -> None:
    print(f"seed {seed}: draw cases again by it")
    draw = random.Random(seed)
    for number in range(cases):
        arguments, environment = case(draw)
        place = tmp_path / str(number)
        (place / "folder").mkdir(parents=True)
        (place / "file").write_bytes(draw.randbytes(20))
        os.mkfifo(place / "fifo")
        if "train" in arguments and "--epochs" not in arguments:
            arguments += SMALL
        ended = run_lockstep(*arguments, cwd=place, env=environment, timeout=60)
        story = f"seed {seed}, case {number}: {arguments} {environment}\n{ended.text}"
        assert ended.code in (0, 2), story
        assert "Traceback" not in ended.out + ended.err, story
        assert ended.orphans == (), story
        if ended.code == 2:
            assert ended.err.startswith(("lockstep: ", "\u256d", "\u250c", "usage")) or "lockstep: " in ended.err, story
            assert not (place / "runs").exists(), story


def test_any_command_line_is_done_or_refused_in_a_sentence(tmp_path: Path) -> None:
    check(20261122, 12, tmp_path)


@pytest.mark.slow
def test_many_command_lines_by_another_seed_each_time(tmp_path: Path) -> None:
    check(int(os.environ.get("LOCKSTEP_FUZZ_SEED") or secrets.randbelow(2**32)), 60, tmp_path)
