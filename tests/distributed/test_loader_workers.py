"""Loader workers: what is killed comes back with the same result, and no batch needs room in /dev/shm."""

import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from lockstep.distributed import proc, warm
from lockstep.distributed.loader_workers import LoaderWorkers, begin, result, running
from lockstep.errors import UserError
from tests.journals import read
from tests.subprocesses import Command, Completed, run_lockstep

ALL = tuple[Tensor, ...]

MINE = """
import os, signal, time
from dataclasses import dataclass
import numpy as np, torch
from pathlib import Path

@dataclass
class Images:
    name: str
    count: int
    deadly: int
    mean: tuple = (0.5,)
    std: tuple = (0.5,)
    classes: tuple = ("a", "b")
    shape: tuple = (1, 8, 8)
    fingerprint: str = "mine"
    notes: tuple = ()
    def __len__(self):
        return self.count
    def read(self, ids, epoch):
        strike("loader", os.getpid(), epoch == 1)
        strike("warm", os.getppid(), epoch == 2)
        if epoch == 0 and self.deadly in ids:
            os.kill(os.getpid(), signal.SIGSEGV) if self.name == "train" else exit(3)
        pixels = torch.arange(self.count * 64).reshape(self.count, 1, 8, 8) * 37 % 251
        return pixels[ids].to(torch.uint8), torch.from_numpy(ids % 2)

def strike(whom, pid, now):
    try:
        if now:
            Path("once", whom).touch(exist_ok=False)
            os.kill(pid, signal.SIGKILL)
            time.sleep(60)  # the kernel ends a worker with its warm process
    except (FileExistsError, FileNotFoundError):
        pass

def sets(deadly=-1):
    return Images("train", 48, deadly), Images("val", 10, -1)

def deadly():
    return sets(13)

def leaving():
    return Images("leaves", 48, 13), Images("val", 10, -1)
"""
TRAIN = ("train", "--model", "mlp", "--batch-size", "8", "--epochs", "3", "--exact", "2", "--threads", "1")


def trained(place: Path, out: str, *flags: str, dataset: str = "mine:sets") -> Completed:
    return run_lockstep(*TRAIN, "--dataset", dataset, "--out", out, *flags, cwd=place)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.slow
def test_killed_workers_and_their_warm_process_come_back_with_the_same_result(place: Path) -> None:
    found = {}
    for out, flags in {"straight": "1 0", "alone": "1 2", "two": "2 1"}.items():
        nproc, workers = flags.split()
        if out != "straight":
            shutil.rmtree(place / "once", ignore_errors=True)
            (place / "once").mkdir()
        ended = trained(place, out, "--nproc", nproc, "--workers", workers)
        assert (ended.code, ended.orphans) == (0, ()), ended.text
        assert out == "straight" or {path.name for path in (place / "once").iterdir()} == {"loader", "warm"}
        told = [line for line in ended.err.splitlines() if "atexit" not in line]
        again = "lockstep: a loader worker was killed by SIGKILL; it is started again"
        assert told[:1] == [again] * (out != "straight"), ended.text
        if out == "two":
            assert told[-1] == (
                "lockstep: rank 0: the process that starts the ranks was killed by SIGKILL; "
                "restart 1 of 3 on 2 process(es)"
            ), ended.text
        end = read(place / out / "journal.jsonl")[-1]
        found[out] = end["ledger_sha256"], end["weights_sha256"]
    assert len(set(found.values())) == 1, found


def test_a_worker_that_dies_at_the_same_samples_again_and_again_is_told_with_them(place: Path) -> None:
    ended = trained(place, "run", "--nproc", "1", "--workers", "2", dataset="mine:deadly")
    assert (ended.code, ended.orphans) == (2, ()), ended.text
    assert "a loader worker was killed by SIGSEGV, 3 times in a row, reading sample(s) " in ended.err
    assert "--workers 0" in ended.err


@pytest.mark.slow
def test_code_that_ends_the_program_in_a_worker_is_named_by_its_line(place: Path) -> None:
    train = (*TRAIN, "--dataset", "mine:leaving", "--out", "run", "--nproc", "1", "--workers", "1")
    ended = Command(sys.executable, "-P", "-m", "lockstep", *train, cwd=place).end(120)  # as the script starts
    assert (ended.code, ended.orphans) == (2, ()), ended.text
    assert re.search(r"mine\.py, line \d+: .*exit\(3\) ended the program, exit code 3", ended.err), ended.text


SHM = 'mount -t tmpfs -o {} none /dev/shm && mount -t tmpfs none /proc && exec "$@"'


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a file system in a namespace")
@pytest.mark.slow
@pytest.mark.parametrize(("options", "nproc"), [("ro", 2), ("size=64k", 1)])
def test_a_small_or_read_only_dev_shm_and_a_hidden_proc_are_as_good(place: Path, options: str, nproc: int) -> None:
    train = (*TRAIN, "--dataset", "mine:sets", "--out", "run", "--nproc", str(nproc), "--workers", "1")
    hidden = ("unshare", "--mount", "bash", "-c", SHM.format(options), "bash")
    ended = Command(*hidden, sys.executable, "-m", "lockstep", *train, cwd=place).end(120)
    assert (ended.code, ended.orphans) == (0, ()), ended.text
    assert "Traceback" not in ended.err, ended.text
    assert "leaked" not in ended.err, ended.text


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    warm.let_go()


class Boom(Exception):
    """Takes two arguments, so pickle can't bring it back from one."""

    def __init__(self, what: str, more: str) -> None:
        super().__init__(what)


def numbered(request: tuple[list[int], int]) -> ALL:
    (number, *_), milliseconds = request
    time.sleep(milliseconds / 1000)
    if number == 13:
        raise FileNotFoundError(2, "No such file", "13.png")
    if number == 14:
        raise Boom("a", "b")
    if number == 15:
        raise UserError("15.png is truncated", "Replace it.")
    return torch.full((2, 3), number, dtype=torch.bfloat16), torch.empty(0), torch.tensor([os.getpid()])


def large(request: int) -> ALL:
    if request == -1:  # one element, of whatever stride
        return (torch.zeros((), dtype=torch.int64).expand(1, 1),)
    return (torch.arange(request, dtype=torch.int32).reshape(-1, 5).t(),)


def test_answers_come_in_order_whatever_each_takes_and_errors_are_the_task_s_own() -> None:
    pool = LoaderWorkers(2, numbered, "numbers")
    answers = list(pool.map(([number], 20 * (number % 3 == 0)) for number in range(12)))
    assert [int(first[0, 0]) for first, _, _ in answers] == list(range(12))
    assert all(first.shape == (2, 3) and len(none) == 0 for first, none, _ in answers)
    pids = {pid for _, pid in running()}
    assert os.getpid() not in pids
    assert {int(pid) for _, _, pid in answers} <= pids
    left = pool.map(([number], 0) for number in range(100))
    next(left)
    left.close()  # in the middle, with answers still under way
    kinds = (13, FileNotFoundError, "13.png"), (14, RuntimeError, "Boom: a"), (15, UserError, "15.png")
    for number, kind, words in kinds:
        with pytest.raises(kind, match=words) as caught:
            list(pool.map([([number], 0)]))
        notes = "".join(getattr(caught.value, "__notes__", []))
        assert ("in numbered" in notes) == (kind is not UserError), "where the worker was"
        del caught
    assert {pid for _, pid in running()} == pids, "usable after errors"
    processes = [psutil.Process(pid) for pid in pids]
    del pool
    assert not psutil.wait_procs(processes, 10)[1], "they end with the pool"
    assert not running()


def test_a_warm_process_that_is_stopped_goes_on_when_a_worker_is_needed(capfd: pytest.CaptureFixture[str]) -> None:
    process = warm.current().process
    assert process is not None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    answers = LoaderWorkers(1, numbered, "numbers").map([([1], 0)])
    late = threading.Timer(60, os.kill, (process.pid, signal.SIGCONT))  # so that a failure is no hang
    late.start()
    assert len(list(answers)) == 1
    assert late.is_alive(), "nobody let it go on"
    late.cancel()
    told = f"(pid {process.pid}) is stopped by a signal (SIGSTOP, Ctrl-Z); it is told to go on"
    assert told in capfd.readouterr().err


def test_workers_outlive_signals_to_the_group_and_tell_where_they_are() -> None:
    pool = LoaderWorkers(1, numbered, "numbers")
    assert list(pool.map([([1], 0)]))
    ((_, pid),) = before = running()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(pid, number)
    assert [int(told) for _, _, told in pool.map([([2], 0)])] == [pid]
    assert running() == before
    assert re.match("sleeping|running", proc.state(pid))


def test_a_batch_of_any_size_and_layout_arrives_as_it_was() -> None:
    pool = LoaderWorkers(1, large, "large")
    for size in (5, 10_000_000, -1):
        ((tensor,),) = pool.map([size])
        assert torch.equal(tensor, *large(size))
        assert tensor.is_contiguous()


@pytest.mark.slow
def test_of_more_tasks_than_a_pipe_holds_reports_of_their_ends_none_waits() -> None:
    assert [result(begin(int)) for _ in range(400)] == [0] * 400


def test_what_can_not_be_sent_is_named() -> None:
    with pytest.raises(UserError, match=r"mine can't be handed to worker processes: .*lock"):
        LoaderWorkers(1, partial(large, threading.Lock()), "mine")  # type: ignore[arg-type]
