"""A run under way goes on with another number of processes: the same run, from memory, with nothing left behind."""

import dataclasses
import json
import os
import re
import signal
import tempfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from lockstep.checkpoint.store import Snapshot
from lockstep.commands.resize import main
from lockstep.config.recipes import recipe
from lockstep.distributed.files import LOCK, hold
from lockstep.distributed.rendezvous import STORE
from lockstep.distributed.resize import REQUEST, asked, places, read_request, remove_states
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import assemble
from lockstep.training.resize import keep, objection, wishes
from tests.distributed.test_restarts import records
from tests.subprocesses import Command, lockstep, run_lockstep

# at a constant rate a run does not depend on how many epochs it shall have: it is ended when all has been tried
FLAGS = (
    *("train", "--threads", "1", "--log-every", "5", "--schedule", "constant", "--warmup-epochs", "0"),
    *("--eval-every", "1000", "--override", "epochs"),
)
SAME = ("status", "steps", "samples", "ledger_sha256", "weights_sha256", "top1", "loss")
ENDLESS = ("--epochs", "100000", "--out", "run")


def handed_over() -> set[Path]:
    """What waits for processes to come, on all of this machine."""
    return {path for place in ("/dev/shm", tempfile.gettempdir()) for path in Path(place).glob("lockstep-resize-*")}


def kinds(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record["kind"] == kind]


def resize(place: Path, nproc: int) -> str:
    ended = run_lockstep("resize", "run", "--nproc", str(nproc), cwd=place, timeout=120)
    assert (ended.code, ended.orphans) == (0, ()), ended.text
    return ended.out


def starting(command: Command, folder: Path) -> None:
    """Wait until its folder is held: before that there is no run to speak of."""
    command.until((folder / LOCK).is_file, 120)


def stepping(command: Command, folder: Path) -> None:
    """Wait until its newest processes have taken steps."""

    def reached() -> bool:
        found = [record["kind"] for record in records(folder)]
        return "run" in found and "step" in found[len(found) - found[::-1].index("run") :]

    command.until(reached, 120)


def compared(command: Command, place: Path, flags: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """End a run in the midst of a resize, complete its epoch by the same command, and train as long undisturbed: both
    `end` records, and what the run has printed."""
    before, asking = handed_over(), lockstep("resize", "run", "--nproc", "2", cwd=place)
    command.until(lambda: handed_over() - before, 120)
    command.signal(signal.SIGTERM)
    ended = command.end(180)
    assert (ended.code, ended.orphans) == (143, ()), ended.text
    assert asking.end(60).code in (0, 2)
    found = records(place / "run")
    last = max(i for i, record in enumerate(found) if record["kind"] == "run")  # those before, if killed, may be ahead
    assert found[-1]["steps"] >= max(record.get("step", 0) for record in found[last:])
    begun = max(i for i, record in enumerate(found) if record["kind"] == "run" and "resized_from" not in record)
    trained = next(record["time"] for record in found[begun:] if record["kind"] == "step")
    resized = max(record["time"] for record in found[begun:] if record["kind"] == "resize")
    told = re.findall(r"^trained in +([\d:.]+) ", ended.out, re.MULTILINE)
    seconds = sum(float(part) * 60**place for place, part in enumerate(reversed(told[0].split(":"))))
    assert seconds > resized - trained - 1, "it counts from the last resize alone"
    epochs = str(found[-1]["steps"] // next(r["steps_per_epoch"] for r in found if r["kind"] == "run") + 1)
    for out, nproc in (("run", "2"), ("straight", "1")):
        again = run_lockstep(*FLAGS, *flags, "--epochs", epochs, "--nproc", nproc, "--out", out, cwd=place, timeout=240)
        assert again.code == 0, again.text
    return records(place / "run")[-1], records(place / "straight")[-1], ended.out + ended.err


def test_resizes_and_a_kill_change_no_bit_and_leave_nothing(tmp_path: Path) -> None:
    exact = ("--exact", "3", "--checkpoint-every", "20steps", "--ema", "0.9")
    folder, before = tmp_path / "run", handed_over()
    command = lockstep(*FLAGS, *ENDLESS, *exact, "--nproc", "1", cwd=tmp_path)
    starting(command, folder)
    assert "1 -> 3 processes at step " in resize(tmp_path, 3)  # asked for while it starts
    stepping(command, folder)
    command.signal(signal.SIGKILL, command.workers()[2])
    assert "3 -> 2 processes at step " in resize(tmp_path, 2)  # asked for while it is started again
    assert "2 -> 1 processes at step " in resize(tmp_path, 1)
    stepping(command, folder)
    runs, resizes, (restart,) = kinds(folder, "run"), kinds(folder, "resize"), kinds(folder, "fault")
    assert (restart["fault"], restart["step"], restart["processes"]) == ("restart", runs[2]["resumed_from"], 3)
    assert restart["cause"].startswith("rank 2: killed by SIGKILL")
    assert [each["world"]["size"] for each in runs] == [1, 3, 3, 2, 1]
    assert [each.get("resized_from", 0) for each in runs] == [0, 1, 0, 3, 2]
    assert [(each["before"], each["processes"]) for each in resizes] == [(1, 3), (3, 2), (2, 1)]
    assert [each["step"] for each in resizes] == [runs[place]["resumed_from"] for place in (1, 3, 4)]
    refused = run_lockstep("resize", "run", "--nproc", "4", cwd=tmp_path)
    assert (refused.code, refused.out) == (2, ""), refused.text
    assert "run stays as it is: --exact 3 can't be shared out over 4 processes" in refused.err
    assert resize(tmp_path, 1) == "run runs on 1 process(es) already\n"
    listed = json.loads(run_lockstep("runs", ".", "--json", cwd=tmp_path).out)[0]
    assert (listed["processes"], listed["resumes"], listed["resizes"]) == (1, 1, 3)
    mine, straight, said = compared(command, tmp_path, exact)
    over = run_lockstep("resize", "run", "--nproc", "2", cwd=tmp_path)
    assert (over.code, over.err) == (2, f"lockstep: run does not run: it has ended at step {mine['steps']}\n")
    assert {name: mine[name] for name in SAME} == {name: straight[name] for name in SAME}
    assert "restart 1 of 3 on 3 process(es)" in said
    assert "3 -> 2 processes at step " in said
    assert said.count("digits: ") == 2  # the lines of a start come with the first one and with the restart
    assert handed_over() <= before
    assert not (folder / REQUEST).exists()


@pytest.mark.slow
def test_without_exact_mode_it_is_the_same_run_up_to_rounding(tmp_path: Path) -> None:
    plain = ("--optimizer", "sgd", "--lr", "0.01", "--loader", "streaming", "--workers", "1")
    command = lockstep(*FLAGS, *ENDLESS, *plain, "--nproc", "2", cwd=tmp_path)
    starting(command, tmp_path / "run")
    for nproc in (1, 2, 3):
        resize(tmp_path, nproc)
    stepping(command, tmp_path / "run")
    mine, straight, said = compared(command, tmp_path, plain)
    assert mine["ledger_sha256"] == straight["ledger_sha256"]
    assert "restart" not in said
    assert not kinds(tmp_path / "run", "law")  # the comparison of steps found nothing
    weights = [load_file(tmp_path / name / "weights" / "final.safetensors") for name in ("run", "straight")]
    for name, value in weights[0].items():
        assert value == pytest.approx(weights[1][name], rel=1e-2, abs=1e-3), name


GONE = 1 << 22  # above the pids that the kernel gives


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        (None, "run holds no run"),
        ({"host": "another-host", "pid": 1, "since": ""}, "run runs on another machine"),
        ({"pid": GONE, "since": ""}, "run does not run: its process is gone and left no end"),
    ],
)
def test_what_does_not_run_here_is_refused(
    lock: dict[str, Any] | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    if lock is not None:
        (tmp_path / "run" / LOCK).write_text(json.dumps({"host": os.uname().nodename, **lock}))
        (tmp_path / "run" / "journal.jsonl").touch()
    with pytest.raises(UserError, match=said):
        main(["run", "--nproc", "2"])
    with pytest.raises(UserError, match="resize needs --nproc, a number of processes"):
        main(["run"])


def test_one_request_at_a_time_and_those_of_commands_that_were_killed_do_not_count(tmp_path: Path) -> None:
    with hold(tmp_path):
        (tmp_path / REQUEST).write_text(json.dumps({"nproc": 3, "pid": GONE, "answer": "", "done": False}))
        left = read_request(tmp_path)
        assert left is not None
        assert not left.waits
        with asked(tmp_path, 2):
            request = read_request(tmp_path)
            assert request is not None
            assert (request.nproc, request.pid, request.waits) == (2, os.getpid(), True)
            with pytest.raises(UserError, match=r"another resize of .* is under way, to 2 process"), asked(tmp_path, 4):
                pass
        assert not (tmp_path / REQUEST).exists()


def test_what_a_config_a_machine_or_another_launcher_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    config, world = recipe("digits"), World.single()
    run = assemble(config, world)
    small = dataclasses.replace(config, batch_size=2)
    assert objection(config, world, run, 3) == ""
    assert "a batch of 2 is smaller than the 3 processes" in objection(small, world, run, 3)
    two = World(0, 2, 0, 1, world.device, "gloo")
    assert "on several machines" in objection(config, two, run, 3)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "another launcher (torchrun, mpirun, srun) started its ranks" in objection(config, world, run, 3)
    monkeypatch.setenv(STORE, "")
    run.model.seen = []  # type: ignore[assignment]
    run.began = run.hidden()
    run.model.seen.append(run)
    assert "training moves seen, which can't be handed over" in objection(config, world, run, 3)


def test_a_request_waits_while_a_checkpoint_is_written_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, world, clock = recipe("digits"), World.single(), SimpleNamespace(now=100.0)
    monkeypatch.setattr("lockstep.training.resize.time", SimpleNamespace(monotonic=lambda: clock.now))
    writer: Any = SimpleNamespace(busy=True)
    wish = wishes(config, world, assemble(config, world), tmp_path, writer)
    assert wish() == 0
    with asked(tmp_path, 3):
        assert wish() == wish() == 0
        writer.busy = False
        assert wish() == 3
        writer.busy = True
        assert wish() == 0
        clock.now += 9.9
        assert wish() == 0
        clock.now += 0.1
        assert wish() == 3
    assert wish() == 0


def test_where_the_state_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory where that has room, else on the disk, else nowhere; what a killed run has left is removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    free = {"/dev/shm": 100, str(tmp_path): 1000}
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage(free[str(place)]))
    assert [len(list(places(size))) for size in (50, 500, 5000)] == [2, 1, 0]
    on_disk = Snapshot(3, {"model.safetensors": {"w": torch.zeros(100)}, "optimizer.safetensors": {}}, {})
    kept = keep(on_disk)
    assert kept.parent.parent == tmp_path
    with pytest.raises(UserError, match=r"neither /dev/shm nor TMPDIR has 0 MiB free"):
        keep(dataclasses.replace(on_disk, tensors={"model.safetensors": {"w": torch.zeros(1000)}}))
    orphan = tmp_path / f"lockstep-resize-{GONE}-x"
    orphan.mkdir()
    remove_states(mine=False)
    assert not orphan.exists()
    assert kept.exists()
    remove_states(mine=True)
    assert not kept.exists()
