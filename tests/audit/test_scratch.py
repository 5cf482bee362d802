"""The user's files stay as they are: a script runs in a copy, and is refused and named where it reaches out of it."""

import hashlib
import time
from pathlib import Path

import pytest

from lockstep.commands.audit import launch, scratch
from lockstep.commands.audit.inside import in_copy
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.report import surroundings

SCRIPT = """
import os, shutil, socket, subprocess, sys, urllib.request
import torch
from pathlib import Path
rank, outside = os.environ["RANK"], Path(OUTSIDE)

def refused(function, kind, word):
    try:
        function()
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{word} was not refused")

Path("notes.txt").write_text("changed")
torch.save({}, "model.pt")
os.makedirs("logs", exist_ok=True)
if rank == "0":
    assert Path("data/big.bin").stat().st_size == 4000
    os.remove("old.txt")
    shutil.rmtree("gone")
    refused(lambda: open("data/big.bin", "ab"), PermissionError, "was there before")
    refused(lambda: torch.save({}, "data/big.bin"), PermissionError, "was there before")
    os.remove("data/big.bin")  # a link
    refused(lambda: os.remove(outside / "kept.txt"), PermissionError, "kept.txt")
    refused(lambda: (outside / "kept.txt").write_text("no"), PermissionError, "kept.txt")
    refused(lambda: os.remove(HERE / "notes.txt"), PermissionError, "notes.txt")
    (outside / "new.txt").write_text("of the script")
    os.remove(outside / "new.txt")
    refused(lambda: socket.create_connection(("192.0.2.1", 80), timeout=1), OSError, "192.0.2.1")
    refused(lambda: socket.getaddrinfo("example.org", 443), OSError, "example.org")
    refused(lambda: urllib.request.urlopen("https://example.org/data.zip"), OSError, "example.org")
    refused(lambda: subprocess.run(["wget", "https://example.org/x"]), OSError, "wget")
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).close()
    socket.getaddrinfo("localhost", 80)
    print("checked")
"""


def digest(folder: Path) -> str:
    """Of all names and modes below a folder, and of files' contents and times."""
    hashed = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        hashed.update(f"{path} {path.lstat().st_mode}".encode())
        if path.is_file():
            hashed.update(path.read_bytes() + str(path.lstat().st_mtime_ns).encode())
    return hashed.hexdigest()


@pytest.mark.slow
def test_a_script_changes_nothing_but_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, outside = tmp_path / "mine", tmp_path / "outside"
    for folder in (mine / "data", mine / "gone/deep", mine / ".git", outside):
        folder.mkdir(parents=True)
    for name in ("notes.txt", "old.txt", "gone/deep/x", ".git/config", "data/big.bin"):
        (mine / name).write_text("mine" if "big" not in name else "b" * 4000)
    (outside / "kept.txt").write_text("kept")
    script = mine / "train.py"
    script.write_text(SCRIPT.replace("OUTSIDE", repr(str(outside))).replace("HERE", f"Path({str(mine)!r})"))
    monkeypatch.setattr(scratch, "LARGEST", 3500)
    time.sleep(0.05)  # the kernel's clock of files is coarser than Python's
    plan, before = Plan("", (), "", "", "", 2, begun=time.time()), digest(tmp_path)
    with launch.starter(script) as process:
        record = launch.start(process, script, [], plan, tmp_path / "run")
    assert record.ended == "done", record.printed
    assert record.printed[0] == "checked\n", record.printed
    copied = tmp_path / "run/copy"
    assert not (copied / ".git").exists()
    assert not (copied / "data/big.bin").exists()
    assert not (copied / "gone").exists()
    assert (copied / "notes.txt").read_text() == "changed"
    for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    (tmp_path / "run").rmdir()
    assert digest(tmp_path) == before
    told = surroundings([record])
    assert told[0] == "1 large file linked to, not copied"
    network = next(line for line in told if line.startswith("network, refused: "))
    assert [word in network for word in ("192.0.2.1 (train.py:", "example.org", "wget")] == [True] * 3
    assert f"deleted, refused, was there before: {outside}/kept.txt (rank 0), {mine}/notes.txt (rank 0)" in told
    assert f"written, outside the copy: {outside}/new.txt (rank 0)" in told
    assert any(line.startswith("written: ") and "model.pt (ranks 0, 1)" in line for line in told), told
    assert any(line.startswith("deleted: ") and "old.txt (rank 0)" in line for line in told), told


def test_modules_are_imported_from_the_copy_and_libraries_from_their_environment(tmp_path: Path) -> None:
    for folder in ("mine/src", "mine/.venv/lib/site-packages", "mine/env/lib/site-packages", "elsewhere/src"):
        (tmp_path / folder).mkdir(parents=True)
    scratch.copy(tmp_path / "mine", tmp_path / "copy")
    plan = Plan("", (), str(tmp_path / "copy"), str(tmp_path / "mine"), "", 1)
    assert in_copy(f"{tmp_path}/mine/src", plan) == f"{tmp_path}/copy/src"
    for kept in ("mine/.venv/lib/site-packages", "mine/env/lib/site-packages", "elsewhere/src", "mine/absent"):
        assert in_copy(f"{tmp_path}/{kept}", plan) == f"{tmp_path}/{kept}"
