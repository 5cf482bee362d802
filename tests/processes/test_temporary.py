"""Temporary folders of runs: gone at the end, and after a kill at the next start."""

import os
import tempfile
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.processes.lock import try_lock
from lockstep.processes.temporary import temporary_folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _left(path: Path, mode: int = 0o700) -> Path:
    """A folder as a killed process leaves it, an hour ago."""
    path.mkdir()
    (path / "failure-0.json").write_text("{}")
    path.chmod(mode)
    os.utime(path, (0, 0))
    return path


def test_what_a_killed_process_left_goes_at_the_next_start_and_nothing_else(place: Path) -> None:
    _left(place / "lockstep-abcdefgh")
    _left(place / "lockstep-verify-abc_efg1")
    kept = [_left(place / "lockstep-open0000", 0o755), _left(place / "lockstep-mine"), _left(place / "elsewhere")]
    (place / "lockstep-link0000").symlink_to(place / "elsewhere")
    (place / "lockstep-file0000").write_text("")
    (young := place / "lockstep-young000").mkdir(mode=0o700)
    used = _left(place / "lockstep-inuse000")
    descriptor = os.open(used, os.O_RDONLY)
    assert try_lock(descriptor)
    try:
        with temporary_folder() as own, temporary_folder("chaos-") as other:
            os.utime(own, (0, 0))
            with temporary_folder():
                assert Path(own).is_dir()
            assert Path(other).name.startswith("lockstep-chaos-")
    finally:
        os.close(descriptor)
    left = {path.name for path in place.iterdir()}
    assert left == {*(path.name for path in (*kept, young, used)), "lockstep-link0000", "lockstep-file0000"}
    assert all((path / "failure-0.json").exists() for path in (*kept, used))


def test_no_place_for_temporary_files_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no place for temporary files: No such file(.|\n)*TMPDIR"), temporary_folder():
        pass
