"""Cores, memory, shared memory, open files and disks: each fault is a real one, or a file in place of the kernel's."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.commands.doctor import host, storage
from lockstep.commands.doctor.plan import Plan

GIB, MIB = 2**30, 2**20


def in_a_child(program: str) -> object:
    """What a program prints as JSON, from a process of its own, where limits may be lowered."""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 8), st.none() | st.floats(0.5, 64))
def test_what_the_remedy_says_is_well(usable: int, processes: int, threads: int, quota: float | None) -> None:
    (found,) = host.cores(Plan(threads=threads, workers=0), processes, usable, quota, 64.0, {})
    wanted = processes * (threads or max(1, usable // processes))
    limit = min(usable, quota or usable)
    assert (found.status == "warn") == (wanted > limit)
    if found.status == "warn":
        words = found.remedy.replace(".", "").replace(",", "").split()
        fewer = int(words[words.index("--nproc") + 1]) if "--nproc" in words else processes
        assert fewer * int(words[words.index("--threads") + 1]) <= max(1, limit)


def test_a_quota_is_named() -> None:
    (found,) = host.cores(Plan(threads=0, workers=0), 2, 64, 2.0, 64.0, {})
    assert found.message == "2 process(es) x 32 thread(s) on a control group grants 2 of 64 cores"
    assert found.remedy.startswith("Use --threads 1")


def test_workers_and_omp_num_threads_count_too() -> None:
    found = list(host.cores(Plan(threads=1, workers=8), 4, 4, None, 4.0, {"OMP_NUM_THREADS": "4"}))
    assert [(each.check, each.status) for each in found] == [
        ("cores", "ok"),
        ("workers", "warn"),
        ("OMP_NUM_THREADS", "warn"),
    ]
    assert not [
        each
        for each in host.cores(Plan(threads=1, workers=2), 4, 4, None, 4.0, {"OMP_NUM_THREADS": "1"})
        if each.status != "ok"
    ]
    assert (
        list(host.cores(Plan(threads=1, workers=0), 1, 4, None, 4.0, {"OMP_NUM_THREADS": "many"}))[1].status == "warn"
    )


def test_cores_that_others_use_are_told() -> None:
    (found,) = host.cores(Plan(threads=1, workers=0), 4, 4, None, 1.2, {})
    assert (found.status, found.numbers["got_cores"]) == ("warn", 1.2)
    assert "1.2 cores" in found.message


def test_a_process_tied_to_one_core_gets_one() -> None:
    program = (
        "import json, os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from lockstep.commands.doctor.host import cores_got; print(json.dumps(cores_got(3)))"
    )
    got = in_a_child(program)
    assert isinstance(got, float)
    assert 0 < got < 1.2


def test_memory() -> None:
    assert host.memory(2, 8 * GIB, None).status == "ok"
    assert host.memory(2, 8 * GIB, 1.5 * GIB).status == "warn"
    found = host.memory(2, 8 * GIB, 0.5 * GIB)
    assert found.status == "fail"
    assert "a control group grants 0.5 GiB for 2 process(es)" in found.message
    assert "the host has" in host.memory(64, 8 * GIB, 9 * GIB).message


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("this user may mount no file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_little_shared_memory(tiny: Path) -> None:
    found = host.shm(2, tiny)
    assert found.status == "fail"
    assert found.message == "2 of 2 MiB free; 64 MiB of it can't be had: No space left on device"
    assert "--shm-size" in found.remedy
    assert host.shm(0, tiny).status == "warn"  # nobody needs it
    assert not list(tiny.iterdir())


def test_shared_memory() -> None:
    assert host.shm(2, Path("/nowhere")).status == "skipped"
    if Path("/dev/shm").is_dir():
        assert "MiB free" in host.shm(2).message


@pytest.mark.parametrize(("limit", "status"), [(100, "fail"), (512, "warn"), (1024, "ok")])
def test_open_files(limit: int, status: str) -> None:
    program = (
        "import json, resource; from dataclasses import asdict; from lockstep.commands.doctor.host import open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "print(json.dumps(asdict(open_files())))"
    )
    found = in_a_child(program)
    assert isinstance(found, dict)
    assert found["status"] == status
    assert f"ulimit -n {limit}" in found["message"] or f"ulimit -n is {limit}" in found["message"]
    assert bool(found["remedy"]) == (status != "ok")


def test_a_folder_for_runs(tmp_path: Path) -> None:
    found = storage.runs(str(tmp_path / "not/there/yet"), 30)
    assert found.status in ("ok", "warn"), found  # a slow disk is no fault of the program
    assert str(tmp_path) in found.message
    assert found.numbers["write_mib_per_s"] > 0
    assert not list(tmp_path.iterdir())


def test_a_full_disk(tiny: Path) -> None:
    found = storage.runs(str(tiny), 30)
    assert (found.status, found.message) == ("fail", f"{tiny}: No space left on device")
    assert "Free some space" in found.remedy
    assert "writable" not in found.remedy
    assert not list(tiny.iterdir())


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    if os.access(tmp_path, os.W_OK):  # root may: then the file system must refuse
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(tmp_path)], capture_output=True)
        if made.returncode != 0:
            pytest.skip("root that may mount nothing")
    try:
        found = storage.runs(str(tmp_path / "runs"), 30)
    finally:
        tmp_path.chmod(0o755) if not os.path.ismount(tmp_path) else subprocess.run(
            ["umount", str(tmp_path)], check=True
        )
    assert found.status == "fail"
    assert "ermission denied" in found.message or "Read-only file system" in found.message
    assert "--out" in found.remedy


def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    silent = threading.Event()

    def write(folder: Path) -> float:
        silent.wait()
        return 1.0

    monkeypatch.setattr(storage, "_write", write)
    found = storage.runs(str(tmp_path), 0.05)
    silent.set()
    assert found.status == "fail"
    assert "did not end in 0.05 s" in found.message
    monkeypatch.setattr(storage, "_write", lambda _: 5.0 * MIB)
    assert storage.runs(str(tmp_path), 30).status == "warn"


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "runs", "")
    assert storage.runs(str(tmp_path / "runs"), 30).status == "fail"
    assert storage.data(str(tmp_path / "runs"), "").status == "fail"


def test_the_data_folder(tmp_path: Path) -> None:
    assert storage.data(str(tmp_path), "").status == "ok"
    assert storage.data("", str(tmp_path / "none")).status == "warn"
    assert "LOCKSTEP_DATA" in storage.data("", str(tmp_path / "none")).message
    os.chdir(tmp_path)
    assert storage.data("", "").status == "ok"
