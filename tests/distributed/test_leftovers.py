"""What user code leaves running, or leaves without a word: a command ends in time, and says what was left."""

import re
import sys
from pathlib import Path

from tests.subprocesses import Command

RANKS = """
import json, multiprocessing, os, subprocess, sys, threading, time
import lockstep
from lockstep.distributed import proc, signals
signals._LINGER_S = proc._LEAVE_S = 0.5

def leave(world, how):
    if how == "thread":
        threading.Thread(target=time.sleep, args=(600,), name="uploader").start()
    if how == "quick thread":
        threading.Thread(target=lambda: time.sleep(0.05) or open("uploaded", "w").close()).start()
    if how == "fork" and os.fork() == 0:
        time.sleep(600)
    if how == "process":
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    if how == "program":
        os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
    if how == "session":
        print("kept", os.posix_spawnp("sleep", ["sleep", "600"], os.environ, setsid=True), flush=True)
    if how.startswith("exit") and world.rank == 1:
        os._exit(int(how[4:]))
    world.barrier()
    if how == "killed" and world.rank == 1:
        os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
        os.kill(os.getpid(), 9)
    world.barrier()
    return world.rank

for how in sys.argv[2:]:
    try:
        print(how, lockstep.launch(leave, how, nproc=int(sys.argv[1])), flush=True)
    except lockstep.WorkerFailed as failed:
        print(how, failed.exit_code, failed, flush=True)
"""


def left(place: Path, nproc: int, *how: str) -> tuple[list[str], list[str]]:
    """What a script with these leftovers prints, and what is told of them; pids and names that vary as `7`."""
    (place / "script.py").write_text(RANKS)
    command = Command(sys.executable, "script.py", str(nproc), *how, cwd=place, warm=True)
    ended = command.end(60)
    assert (ended.code, ended.orphans) == (0, ()), ended.text
    return ended.out.splitlines(), sorted(re.sub(r"\(pid \d+\)", "(pid 7)", ended.err).splitlines())


def test_a_command_ends_in_time_and_names_what_ranks_left_running(tmp_path: Path) -> None:
    out, told = left(tmp_path, 2, "thread", "quick thread", "fork", "process", "program")
    assert out == [f"{how} [0, 1]" for how in ("thread", "quick thread", "fork", "process", "program")]
    assert (tmp_path / "uploaded").exists(), "what ends soon is waited for"
    for rank in (0, 1):
        behind = f"lockstep: rank {rank} left a process behind"
        assert [line for line in told if line.startswith(f"lockstep: rank {rank} ")] == [
            *[f"{behind}: lockstep rank {rank} (pid 7), which is ended now"] * 2,
            f"{behind}: sleep (pid 7), which is ended now",
            f"lockstep: rank {rank} still runs 0.5 s after its end: thread uploader; it is ended now",
        ]
    assert len(told) == 8


def test_a_rank_that_ends_without_a_word_is_named_and_so_is_what_a_killed_one_left(tmp_path: Path) -> None:
    out, told = left(tmp_path, 2, "exit3", "exit0", "killed")
    for line, code in zip(out, (3, 0), strict=False):
        assert line.startswith(f"exit{code} {code or 1} rank 1: its process ended with exit code {code} and no error")
    assert out[2].startswith("killed 1 rank 1: killed by SIGKILL")
    assert told == ["lockstep: rank 1 left a process behind: sleep (pid 7), which is ended now"]


COMMAND = """
import sys
from lockstep.distributed import proc, signals
signals._LINGER_S = proc._LEAVE_S = 0.5
from lockstep.cli import main
main()
"""
NET = """
import os, sys, threading, time
from torch import nn
def net(*_):
    threading.Thread(target=time.sleep, args=(600,), name="uploader").start()
    os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
def exits(*_):
    sys.exit(143)
"""
TRAIN = ("train", "--epochs", "1", "--fraction", "0.2", "--law", "off", "--out", "run", "--nproc", "1", "--model")


def test_the_command_itself_ends_in_time_and_an_exit_code_is_no_signal(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NET)
    ended = Command(sys.executable, "-c", COMMAND, *TRAIN, "mine:net", cwd=tmp_path, warm=True).end(60)
    assert (ended.code, ended.orphans) == (0, ()), ended.text
    assert "test accuracy" in ended.out
    assert "lockstep: train still runs 0.5 s after its end: thread uploader; it is ended now" in ended.err, ended.text
    ended = Command(sys.executable, "-c", COMMAND, *TRAIN, "mine:exits", cwd=tmp_path, warm=True).end(60)
    assert (ended.code, ended.orphans) == (2, ()), ended.text
    assert "sys.exit(143) ended the program, exit code 143" in ended.err
