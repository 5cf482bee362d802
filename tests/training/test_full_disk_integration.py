"""Going on where nothing can be written: a real file system, full or read-only."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inprocess import said
from tests.journals import read

pytestmark = pytest.mark.integration


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    (folder := tmp_path / "disk").mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode or os.geteuid():
        pytest.skip("to mount a file system wants root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_going_on_on_a_full_or_read_only_disk_is_refused_in_a_sentence(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train --nproc 1 --threads 1 --fraction 0.05 --override epochs,warmup_epochs --out {disk}/run".split()
    longer = (*words, "--epochs", 2)
    assert said(capsys, *words, "--epochs", 1)[1] == ""
    subprocess.run(["dd", "if=/dev/zero", f"of={disk}/fill", "bs=1k"], capture_output=True)  # until it is full
    assert "No space left on device\n  Free some space there" in said(capsys, *longer, code=2)[1]
    (disk / "fill").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert "Read-only file system\n  Free some space there" in said(capsys, *longer, code=2)[1]
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert said(capsys, *longer)[1] == ""
    assert read(disk / "run/journal.jsonl")[-1]["status"] == "completed"
