"""Checkpoints on disk: whole or not there, good ones kept, damaged ones set aside, and the user told."""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep.checkpoint import store
from lockstep.checkpoint.format import MANIFEST, MODEL, OPTIMIZER, STATE, Damaged, Manifest
from lockstep.checkpoint.restore import newest, open_checkpoint, restore, verify
from lockstep.checkpoint.store import abandon, folder_name, list_checkpoints, prune, tidy, write
from lockstep.checkpoint.writer import snapshot
from lockstep.errors import UserError
from tests.checkpoint.moments import bits, good, keep, tiny


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, position: int = -1, bit: int = 0) -> None:
    octets = bytearray(path.read_bytes())
    octets[position] ^= 1 << bit
    path.write_bytes(octets)


def test_a_checkpoint_is_a_folder_of_known_files(tmp_path: Path) -> None:
    written = keep(tmp_path / "checkpoints", 460)
    assert written.path == tmp_path / "checkpoints/step-000000460"
    assert names(written.path) == sorted([MANIFEST, MODEL, OPTIMIZER, STATE])
    assert names(written.path.parent) == ["step-000000460"]
    loaded = good(written.path.parent)
    assert (loaded.step, loaded.digest, loaded.path) == (460, written.digest, written.path)
    assert (loaded.state, loaded.set_aside, loaded.has_ema) == ({"step": 460, "value": 460}, (), False)
    assert sum(path.stat().st_size for path in written.path.iterdir() if path.name != MANIFEST) == written.bytes


def test_everything_is_on_the_device_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename
    content: dict[str, int] = {}

    def noted(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(path.name.partition("-")[0] if path.is_dir() else path.name)
        content[path.name] = path.stat().st_size
        sync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    written = keep(tmp_path / "here", 1)
    assert events == [MODEL, OPTIMIZER, STATE, MANIFEST, ".writing", "rename", "here"]
    assert {path.name: path.stat().st_size for path in written.path.iterdir()}.items() <= content.items()


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    keep(tmp_path, 3, value=1)
    keep(tmp_path, 3, value=2)
    assert names(tmp_path) == [folder_name(3)]
    assert verify(tmp_path / folder_name(3)).state["value"] == 2


def test_only_checkpoints_count_as_such(tmp_path: Path) -> None:
    for step in (10, 2, 1_234_567_890):
        keep(tmp_path, step)
    for other in ("step-1", "step-0000000002", "step-00000000x", "damaged-step-000000004", ".writing-0-step-000000005"):
        (tmp_path / other).mkdir()
    assert list(list_checkpoints(tmp_path)) == [2, 10, 1_234_567_890]
    assert list_checkpoints(tmp_path / "nowhere") == {}
    assert newest(tmp_path / "nowhere") is None


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        keep(tmp_path, step)
    assert prune(tmp_path, keep=2, best=3) == [1, 2, 4]
    assert list(list_checkpoints(tmp_path)) == [3, 5, 6]
    assert prune(tmp_path, keep=2, best=6) == [3]
    assert prune(tmp_path, keep=5) == []
    assert names(tmp_path) == [folder_name(5), folder_name(6)]
    keep(tmp_path / "c", 1)
    hidden = store._hide(tmp_path / "c" / folder_name(1), "replaced")
    hidden = store._hide(hidden, "removing")
    assert re.fullmatch(r"\.removing-[0-9a-f]{8}-step-000000001", hidden.name), "so that tidying knows it"
    with pytest.raises(UserError, match="--keep 0 would keep no checkpoint"):
        prune(tmp_path, keep=0)


def test_removal_renames_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        keep(tmp_path, step)

    def stuck(path: Path) -> None:
        (path / MANIFEST).unlink()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shutil, "rmtree", stuck)
    with pytest.raises(UserError, match=r"can't write \(remove\) the old checkpoint .*step-000000001: Input/output"):
        prune(tmp_path, keep=1)
    monkeypatch.undo()
    assert list(list_checkpoints(tmp_path)) == [2]
    (left,) = [name for name in names(tmp_path) if name != folder_name(2)]
    assert left.startswith(".removing-")
    assert tidy(tmp_path) == [left]
    assert names(tmp_path) == [folder_name(2)]


def test_tidying_spares_the_living_and_everything_else(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    dead, alive = tmp_path / ".writing-0123abcd-step-000000002", tmp_path / ".writing-0123abce-step-000000003"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / MODEL).write_bytes(b"half")
    for other in (".hidden", "notes", "damaged-step-000000009", ".writing-x-step-000000002"):
        (tmp_path / other).mkdir()
    before = names(tmp_path)
    with store._locked(alive):
        assert tidy(tmp_path) == [dead.name]
        assert names(tmp_path) == [name for name in before if name != dead.name]
    assert tidy(tmp_path) == [alive.name]
    assert tidy(tmp_path / "nowhere") == []


def test_a_writer_that_was_tidied_away_fails_and_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, 1)

    monkeypatch.setattr(store, "fsync", store._remove)  # as another host would, which sees no lock
    with pytest.raises(UserError, match="No such file or directory"):
        write(snapshot(2, *tiny(2)), tmp_path)
    assert names(tmp_path) == [folder_name(1)]


def test_a_replaced_one_gets_its_name_back(tmp_path: Path) -> None:
    keep(tmp_path, 1, value=5)
    (tmp_path / folder_name(1)).rename(tmp_path / f".replaced-01234567-{folder_name(1)}")
    assert tidy(tmp_path) == [f".replaced-01234567-{folder_name(1)}"]
    assert verify(tmp_path / folder_name(1)).state["value"] == 5
    keep(tmp_path / "other", 1, value=6)
    (tmp_path / "other" / folder_name(1)).rename(tmp_path / f".replaced-01234567-{folder_name(1)}")
    tidy(tmp_path)
    assert verify(tmp_path / folder_name(1)).state["value"] == 5, "the newer one has the name already"


def test_a_course_that_was_left_is_renamed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        keep(tmp_path, step)
    (tmp_path / "abandoned-step-000000002").mkdir()
    assert abandon(tmp_path, after=1) == [folder_name(2), folder_name(3)]
    assert list(list_checkpoints(tmp_path)) == [1]
    assert names(tmp_path) == [
        "abandoned-step-000000002", "abandoned-step-000000002-1", "abandoned-step-000000003", folder_name(1),
    ]  # fmt: skip


def test_damaged_ones_are_set_aside_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        keep(tmp_path, step)
    flip(tmp_path / folder_name(3) / MODEL)
    (tmp_path / folder_name(2) / STATE).unlink()
    loaded = good(tmp_path)
    assert loaded.step == 1
    assert loaded.set_aside == (
        (folder_name(3), f"{MODEL} has another SHA-256 than {MANIFEST} says"),
        (folder_name(2), f"missing: {STATE}"),
    )
    assert names(tmp_path) == ["damaged-step-000000002", "damaged-step-000000003", folder_name(1)]
    assert (tmp_path / "damaged-step-000000003" / MODEL).exists(), "never deleted"
    net, optimizer = tiny(0)
    restore(loaded, net, optimizer)
    assert bits(net.state_dict()) == bits(tiny(1)[0].state_dict())
    keep(tmp_path, 3)
    flip(tmp_path / folder_name(3) / STATE)
    newest(tmp_path)
    assert "damaged-step-000000003-1" in names(tmp_path)


def test_none_left_is_said_so_every_time(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    flip(tmp_path / folder_name(1) / OPTIMIZER)
    with pytest.raises(UserError, match=r"no good checkpoint is left in .*step-000000001: optimizer\.safetensors has"):
        newest(tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=r"no good checkpoint is left in .*damaged-step-000000001") as caught:
            newest(tmp_path)
        assert "another folder with --out" in caught.value.remedy
    keep(tmp_path, 2)
    assert newest(tmp_path) is not None


def test_the_journal_tells_a_forged_one(tmp_path: Path) -> None:
    digests = {step: keep(tmp_path, step).digest for step in (1, 2)}
    assert newest(tmp_path, digests) is not None
    keep(tmp_path, 2, value=666)  # all in order in itself
    loaded = good(tmp_path, digests)
    assert loaded.step == 1
    assert loaded.set_aside == ((folder_name(2), f"{MANIFEST} is not the one that the journal noted"),)
    keep(tmp_path, 3)
    assert good(tmp_path, digests).step == 3, "killed between the rename and the journal's line"


def test_a_named_checkpoint_is_verified_and_stays_where_it_is(tmp_path: Path) -> None:
    written = keep(tmp_path, 1)
    (tmp_path / "latest").symlink_to(written.path)
    assert open_checkpoint(tmp_path / "latest").path == written.path
    assert open_checkpoint(written.path, written.digest).step == 1
    with pytest.raises(UserError, match="not the one that the journal noted"):
        open_checkpoint(written.path, "0" * 64)
    for bad in (tmp_path, tmp_path / "nowhere", written.path / MODEL):
        with pytest.raises(UserError, match="is no good checkpoint"):
            open_checkpoint(bad)
    flip(written.path / MANIFEST)
    with pytest.raises(UserError, match=f"is no good checkpoint: {MANIFEST}"):
        open_checkpoint(written.path)
    assert written.path.exists()


def test_what_can_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = keep(tmp_path, 1)

    def fails(number: int) -> None:
        def opened(path: object, flags: int, *more: int) -> int:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(os, "open", opened)

    for number in (errno.EACCES, errno.ESTALE, errno.EMFILE):
        fails(number)
        with pytest.raises(UserError, match=f"can't read the checkpoint .*{os.strerror(number)}"):
            newest(tmp_path)
    fails(errno.EIO)
    with pytest.raises(Damaged, match=f"{MANIFEST}: Input/output error"):
        verify(written.path)
    monkeypatch.undo()
    assert newest(tmp_path) is not None


def test_set_aside_where_nothing_can_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        keep(tmp_path, step)
    flip(tmp_path / folder_name(2) / MODEL)

    monkeypatch.setattr(Path, "rename", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    loaded = good(tmp_path)
    assert loaded.step == 1
    assert "(and it could not be renamed)" in loaded.set_aside[0][1]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.EDQUOT, "quota exceeded"),
        (errno.EROFS, "Read-only file system"),
        (errno.EACCES, "Permission denied"),
        (errno.EIO, "Input/output error"),
        (errno.ESTALE, "Stale file handle"),
    ],
)
@pytest.mark.parametrize("call", range(5))
def test_a_write_that_fails_names_path_words_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str, call: int
) -> None:
    first = keep(tmp_path, 1)
    before = bits(verify(first.path).state)
    sync, calls = os.fsync, [0]

    def fails(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > call:
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(UserError) as caught:
        keep(tmp_path, 2)
    assert f"can't write the checkpoint {tmp_path}/step-000000002: " in caught.value.message
    assert words in caught.value.message
    for remedy in ("Free some space", "quota", "right to write", "read-only", "another folder"):
        assert remedy in caught.value.remedy
    monkeypatch.undo()
    assert names(tmp_path) == [folder_name(1)], "the half-written one is gone"
    assert bits(verify(first.path).state) == before
    keep(tmp_path, 2)


def test_a_folder_that_vanished_is_named_and_not_made_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    keep(run / "checkpoints", 1)
    shutil.rmtree(run)
    with pytest.raises(UserError, match=r"run/checkpoints/step-000000002: No such file or directory") as caught:
        keep(run / "checkpoints", 2)
    assert "removed, renamed or unmounted" in caught.value.remedy
    assert not run.exists()
    run.write_text("a file")
    with pytest.raises(UserError, match="Not a directory"):
        keep(run / "checkpoints", 2)


def test_an_error_that_is_not_the_systems_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Manifest, "to_bytes", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        write(snapshot(1, *tiny(1)), tmp_path)
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"can't mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    first = keep(folder, 1)
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    for room in range(0, 16 << 10, 4 << 10):  # full at one file after another
        filler.write_bytes(bytes(free - room))
        with pytest.raises(UserError, match=r"can't write .*step-000000002: No space left on device"):
            keep(folder, 2)
        assert names(folder) == [folder_name(1)]
        assert good(folder).digest == first.digest
    filler.unlink()
    keep(folder, 2)
    assert list(list_checkpoints(folder)) == [1, 2]


def test_a_disk_that_became_read_only(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    keep(folder, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"can't write .*step-000000002: Read-only file system"):
        keep(folder, 2)
    assert tidy(folder) == []
    assert good(folder).step == 1, "reading is all right"


def test_a_file_of_another_size_is_told_by_its_size_and_not_read(tmp_path: Path) -> None:
    written = keep(tmp_path, 1)
    size = (written.path / MODEL).stat().st_size
    for found in (size - 1, size + 1, 1 << 40):  # the last is a hole that would take minutes to read
        os.truncate(written.path / MODEL, found)
        with pytest.raises(Damaged, match=f"{MODEL} has {found} bytes instead of {size}"):
            verify(written.path)
