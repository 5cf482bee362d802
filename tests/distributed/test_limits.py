"""Limits of the shell on real commands: a sentence that names the limit, and no traceback."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.subprocesses import Command, Completed

TRAIN = ("train", "--epochs", "1", "--fraction", "0.2", "--out", "run")
AS_SOMEBODY = ("setpriv", "--reuid=54321", "--clear-groups", "--inh-caps=+dac_override", "--ambient-caps=+dac_override")


def limited(place: Path, limit: str, *argv: str, prefix: tuple[str, ...] = ()) -> Completed:
    words = ("bash", "-c", f'{limit}; exec "$@"', "bash", *prefix, sys.executable, "-m", "lockstep", *argv)
    ended = Command(*words, cwd=place).end(120)
    assert (ended.code, ended.orphans) == (2, ()), ended.text
    assert "Traceback" not in ended.err, ended.text
    assert not (place / "run").exists(), "nothing is left of a run that did not start"
    return ended


def test_too_little_address_space(tmp_path: Path) -> None:
    ended = limited(tmp_path, "ulimit -v 2000000", *TRAIN, "--nproc", "1")
    assert "failed to map segment" in ended.err
    assert "ulimit -v" in ended.err


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="the limit is not for root, who sets it")
def test_too_few_threads_and_processes(tmp_path: Path) -> None:
    """A number between what a process needs and what its threads need: later a library would abort."""
    ended = limited(tmp_path, ":", *TRAIN, "--nproc", "2", prefix=(*AS_SOMEBODY, "prlimit", "--nproc=12"))
    assert "this user may start 10 more threads and processes here, and 2 process(es) with " in ended.err
    assert "ulimit -u" in ended.err


@pytest.mark.slow
def test_too_few_open_files(tmp_path: Path) -> None:
    ended = limited(tmp_path, "ulimit -n 20", *TRAIN, "--nproc", "1")
    assert "20 open files are allowed here" in ended.err
    assert "ulimit -n 1024" in ended.err
