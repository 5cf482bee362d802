"""Output that breaks is turned off, told in the journal, and ends nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.processes.output import take_broken, unbreakable_output
from tests.subprocesses import Command


def train(tmp_path: Path, stdout: int, nproc: str) -> list[dict[str, object]]:
    arguments = ("train", "--epochs", "2", "--nproc", nproc, "--threads", "1", "--out", "run")
    ended = Command(sys.executable, "-m", "lockstep", *arguments, cwd=tmp_path, stdout=stdout, warm=True).end()
    assert (ended.code, ended.err, ended.orphans) == (0, "", ()), ended.text
    return [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("how", "nproc"), [("a pipe without a reader", "2"), ("a full disk", "1")])
def test_training_goes_on_without_its_output(tmp_path: Path, how: str, nproc: str) -> None:
    if how == "a full disk":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    try:
        records = train(tmp_path, out, nproc)
    finally:
        os.close(out)
    assert records[-1]["status"] == "completed"
    (told,) = [record for record in records if record["kind"] == "fault"]
    assert told["fault"] == "output"
    assert told["cause"] in ("<stdout>: Broken pipe", "<stdout>: No space left on device")


def test_help_into_a_pipe_that_nobody_reads() -> None:
    reader, out = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lockstep", "--help"]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(out)
    assert (done.returncode, done.stderr) == (0, b"")


def test_only_what_breaks_is_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    with unbreakable_output():
        print("here")
        print("there", file=sys.stderr)
    assert capsys.readouterr() == ("here\n", "there\n")
    assert take_broken() == ""
