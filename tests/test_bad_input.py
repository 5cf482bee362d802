"""Bad input ends with exit code 2, one message that names the thing and the remedy, and nothing left behind.

What is found before a worker starts is run in this process, which spares an import of torch a case; whatever involves
workers or signals is the real command.
"""

import errno
import os
import re
import shlex
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import cli
from tests.data.formats import tree, write_folders
from tests.journals import read
from tests.subprocesses import Command, Completed, lockstep, run_lockstep

USER_CODE = """
import os
import torch
from torch import nn

def net(num_classes, in_channels, image_size):
    if os.environ.get("RANK") == "1":
        raise RuntimeError("no such luck on this rank")
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))

def without_files():
    raise FileNotFoundError("my files are on the other disk")

def label_below_zero():
    part = torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 2, -1, 0, 1, 2, 0])
    return part, part

def no_sets():
    return 3

def no_recipe():
    return {"epochs": 3}

def leaves(*given, **named):
    raise SystemExit(0)

class Leaver(nn.Module):
    def __init__(self, num_classes, in_channels, image_size):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, images):
        leaves()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, but for a module of the user's."""
    (tmp_path / "mine.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """The one message of a command that is refused."""
    with pytest.raises(SystemExit) as end:
        cli.main(shlex.split(line))
    err = capsys.readouterr().err
    assert end.value.code == 2, err
    return checked(err)


def checked(err: str) -> str:
    assert err.startswith("lockstep: "), err
    assert err.count("lockstep: ") == 1, err
    assert "Traceback" not in err
    message, _, remedy = err.partition("\n  ")
    assert message.strip(), "no message"
    assert remedy.strip(), f"no remedy: {err}"
    return err


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, which the message denies")

REFUSED = [
    ("trian", ["unknown command 'trian'", "train"]),
    ("train mnits", ["unknown recipe 'mnits'", "mnist"]),
    ("-v", ["-v stands before a command", "lockstep train"]),
    ("train --device gpu", ["unknown device 'gpu'", "Did you mean cuda or"]),
    ("train --lr=", ["--lr '' is not a number"]),
    ("train --nproc 1 --model timm:resnet999", ["--model timm/resnet999"]),
    ("resize mine.py 2", ["one run folder, got mine.py 2", "resize runs/mine --nproc 3"]),
    ("train --nproc 2 mnits", ["unknown recipe 'mnits'", "mnist"]),
    ("train mnist cifar10", ["one recipe", "mnist cifar10"]),
    ("train ''", ["train: the recipe is an empty text", "leave it out"]),
    ("train mine:no_recipe", ["mine:no_recipe", "lockstep.Config"]),
    ("train mine:nothing", ["mine", "nothing", "no_recipe"]),
    ("train --optimizer adamv", ["adamv", "adamw"]),
    ("train --model resnet18_cifra", ["resnet18_cifra", "resnet18_cifar"]),
    ("train --model nowhere:net", ["nowhere"]),
    ("train --dataset cifar11", ["cifar11", "cifar10"]),
    ("train --precision tf32 --device cpu", ["--precision tf32", "cpu", "fp32"]),
    ("train cifar10 --strategy dp --device cpu", ["unknown strategy 'dp'", "ddp"]),
    pytest.param("train --gpus 0,2", ["--gpus 0,2", "GPU", "--device cpu"], marks=no_gpu),
    pytest.param("train --device cuda", ["--device cuda", "--device cpu"], marks=no_gpu),
    ("show mnits", ["unknown recipe 'mnits'", "mnist"]),
    ("recipes mnist", ["recipes takes no arguments"]),
    ("eval", ["eval needs a run folder"]),
    ("eval nowhere", ["nowhere"]),
    ("train --override bogus", ["unknown entry 'bogus'"]),
    ("train --nproc 8 --exact 3", ["--exact 3 can't be shared out over 8 processes"]),
    ("train mine:leaves", ["mine.py, line", "raise SystemExit(0) ended the program, exit code 0"]),
    ("train --model os:system", ["os:system wants command"]),
    ("train --backend nccl --nproc 2 --device cpu", ["--backend nccl needs", "on cpu"]),
    ("train --schedule multistep --milestones 3,1", ["--milestones 3,1 do not rise"]),
    ("train --adapt-init", ["--adapt-init without --init"]),
    ("eval runs/x --eval-batch-size 5", ["unknown flag '--eval-batch-size'"]),
    ("train --collective-timeout 1e18", ["--collective-timeout 1e+18"]),
    ("train --hang-timeout 1e-9", ["--hang-timeout 1e-09"]),
    ("train --threads 100000", ["--threads 100000"]),
    ("train --threads 4096 --nproc 1", ["--threads 4096 are too many for"]),
    (f"train {'x' * 300}", ["can't be looked up: File name too long"]),
    ("train ~nobody-here", ["~nobody-here can't be looked up"]),
    (f"train folder --data-dir {'x' * 300}", ["File name too long"]),
    ("train folder --nproc 1 --data-dir ~nobody-here/x", ["~nobody-here/x can't be looked up"]),
    (f"train --nproc 1 --dataset table:{'x' * 300}", ["File name too long"]),
    ("train --nproc 1 --dataset table:~nobody-here/x.csv", ["~nobody-here/x.csv can't be looked up"]),
    (f"train --nproc 1 --init {'x' * 300}", ["File name too long"]),
    (f"train --nproc 1 --resume {'x' * 300}", ["File name too long"]),
    (f"eval {'x' * 300}", ["File name too long"]),
    (f"train --nproc 1 --out {'a/' * 1500}b", ["can't be written"]),
    (f"train --batch-size 1{'0' * 400} --scale-lr linear", ["is too large"]),
    (f"train --batch-size 1{'0' * 30} --balance equal", ["is too large"]),
    ("train --nproc 1 --batch-size 999999999 --drop-last", ["--drop-last leaves nothing: 1437 samples do not fill"]),
    (f"train --checkpoint-every {'9' * 400}steps", ["is not a time as 500steps"]),
    ("train --image-size 1000000", ["--image-size 1000000 is too large", "at most 8,192"]),
]


@pytest.mark.parametrize(("line", "parts"), REFUSED, ids=lambda value: value[:60] if isinstance(value, str) else "")
def test_refused_before_anything_starts(
    place: Path, capsys: pytest.CaptureFixture[str], line: str, parts: list[str]
) -> None:
    before = tree(place)
    message = refused(capsys, line)
    for part in parts:
        assert part in message
    assert {name for name in tree(place) if "__pycache__" not in name} == before


ADDRESSES = [
    "compare --out s3://bucket/run",
    "train folder --data-dir gs://bucket/flowers",
    "train --init https://host/weights.safetensors",
    "train folder --cache=hf://datasets/someone/some",
    "train --dataset table:http://host/list.csv",
    "train --resume S3://bucket/run",
    "train --config gs://bucket/config.toml",
    "eval runs/x --report s3://bucket/scores.csv",
    "watch s3://bucket/run",
    "runs s3://bucket",
    "eval runs/x --data abfs://container/photos",
    "predict runs/x https://host/photo.jpg",
    "predict runs/x photo.jpg --sort-into s3://bucket/sorted",
    "predict runs/x photo.jpg --file file:///tmp/answers.csv",
    "diff runs/x s3://bucket/run",
    "preview folder --data-dir flowers --out s3://bucket/preview.png",
    "launch-script slurm --file s3://bucket/job.sh",
]


@pytest.mark.parametrize("line", ADDRESSES)
def test_an_address_where_a_path_is_wanted_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    before = tree(place)
    message = refused(capsys, line)
    address = next(word for word in re.split("[ =]", line.replace("table:", "")) if ":/" in word)
    flag = next((word for word in reversed(re.split("[ =]", line.partition(address)[0])) if word.startswith("--")), "")
    assert f"{flag} {address} is an address".strip() in message
    assert {name for name in tree(place) if "__pycache__" not in name} == before


@pytest.mark.parametrize("line", ["train --out s3:/bucket/run", "predict gs:/bucket/run photo.jpg", "runs HTTPS:/host"])
def test_an_address_with_one_slash_is_no_folder_here(
    place: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    before, address = tree(place), next(word for word in line.split() if ":/" in word)
    assert f"{address}: an address has two slashes" in (message := refused(capsys, line))
    assert f"./{address}" in message
    assert {name for name in tree(place) if "__pycache__" not in name} == before


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ("RANK=0", ["RANK set", "WORLD_SIZE", "unset RANK"]),
        ("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1", ["RANK=2"]),
    ],
)
def test_torn_environments(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, environment: str, parts: list[str]
) -> None:
    for entry in environment.split():
        monkeypatch.setenv(*entry.split("="))
    message = refused(capsys, "train")
    for part in (*parts, "torchrun"):
        assert part in message
    assert not (place / "runs").exists()


def test_a_port_in_use(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(capsys, f"train --nproc 2 --port {port} --out run")
    assert f"--master-port {port} is in use" in message
    assert not (place / "run").exists()


LONG_NAME, LONG_PATH = "x" * 300, "/".join(["deep"] * 1000)  # beyond 255 bytes of a name and 4,096 of a path


@pytest.mark.parametrize(
    "folder",
    [
        *("mine.py/run", "/proc/run", "/dev/null/run"),
        pytest.param(LONG_NAME, id="long name"),
        pytest.param(LONG_PATH, id="long path"),
    ],
)
def test_a_folder_that_cannot_be_written(place: Path, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    before = tree(place)
    message = refused(capsys, f"train --nproc 1 --out {folder}")
    assert f"the run folder {folder} can't be written" in message
    assert "--out" in message
    assert tree(place) == before


def test_a_disk_that_is_full_when_the_config_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    message = refused(capsys, "train --nproc 1 --fraction 0.05 --epochs 1 --out run")
    assert "can't write run/config.json: No space left on device\n  Free some space there" in message
    assert not (place / "run").exists()


def test_a_folder_that_holds_a_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run").mkdir()
    (place / "run/journal.jsonl").write_text("{}\n")
    message = refused(capsys, "train --nproc 1 --out run --resume never")
    assert "run holds a run already" in message
    assert tree(place / "run") == {"journal.jsonl"}


def test_a_config_that_is_a_fifo_is_not_waited_for(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run").mkdir()
    os.mkfifo(place / "run/config.json")
    assert "run/config.json is no plain file" in refused(capsys, "eval run --nproc 1")


def test_data_that_is_missing_and_cannot_be_had(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.data.official.PROBE_SECONDS", 0.5)
    message = refused(capsys, "train mnist --nproc 1 --data-dir sets")
    for part in ("train-images-idx3-ubyte", str(place / "sets/MNIST/raw"), "--data-dir", "LOCKSTEP_DATA", "https://"):
        assert part in message
    assert {name for name in tree(place) if "__pycache__" not in name} <= {"mine.py", "runs"}


def test_a_file_that_is_short(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = place / "sets/MNIST/raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte").write_bytes(b"\0" * 1000)
    message = refused(capsys, "train mnist --nproc 1 --data-dir sets --out run")
    assert re.search(r"train-images-idx3-ubyte is short: 1000 bytes instead of 47040016", message)
    assert "Delete it" in message
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("label_below_zero", ["sample 3 has label -1", "Labels run from 0 to 2"]),
        ("no_sets", ["mine:no_sets", "(train, val)"]),
    ],
)
def test_a_user_s_set_that_does_not_fit(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, parts: list[str]
) -> None:
    message = refused(capsys, f"train --nproc 1 --dataset mine:{name} --out run")
    for part in parts:
        assert part in message
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    "flags",
    [
        *("--model mine:leaves", "--model mine:Leaver", "--dataset mine:leaves", "--optimizer mine:leaves"),
        *("--augment mine:leaves", "--model builtins:exit"),
    ],
)
def test_code_that_ends_the_program_is_no_end_of_a_run(
    place: Path, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    message = refused(capsys, f"train --nproc 1 --loader resident {flags} --out run")
    assert "ended the program, exit code 0" in message
    assert ("mine.py, line" in message) == ("mine" in flags)
    assert (place / "run").exists() == ("Leaver" in flags), "the others end before there is a run"
    if "Leaver" in flags:
        end = read(place / "run/journal.jsonl")[-1]
        assert (end["kind"], end["status"]) == ("end", "failed")
        assert message == f"lockstep: {end['error']}\n"


def test_an_empty_class_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folders(place / "flowers")
    for split in ("train", "val"):
        (place / "flowers" / split / "wasp").mkdir()
    message = refused(capsys, "train folder --nproc 1 --data-dir flowers --out run")
    assert f"the class folder {place}/flowers/train/wasp holds no image" in message
    assert not (place / "run").exists()


def test_a_single_class_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folders(place / "flowers")
    for split in ("train", "val"):
        for folder in sorted((place / "flowers" / split).iterdir())[1:]:
            shutil.rmtree(folder)
    message = refused(capsys, "train folder --nproc 1 --data-dir flowers --out run")
    assert "folder has a single class" in message
    assert not (place / "run").exists()


def test_a_loss_that_is_not_finite_on_one_process(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "train --nproc 1 --lr 1e30 --optimizer sgd --out run")
    assert re.search(r"loss became non-finite at step \d+ on rank\(s\) 0, learning rate \S+e\+", message)
    assert "Lower --lr, add --warmup-epochs or --clip-norm, or leave the batch out with --on-nonfinite roll" in message
    message = refused(capsys, "train --nproc 1 --lr 1e30 --optimizer sgd --precision bf16 --on-nonfinite rollback")
    assert "Lower --lr, add --warmup-epochs or --clip-norm, or use --precision fp32." in message
    end = read(place / "run/journal.jsonl")[-1]
    assert (end["kind"], end["status"]) == ("end", "failed")
    assert "non-finite" in end["error"]


# From here on: the real command, and workers.


def ended_with(ended: Completed, code: int, *parts: str) -> Completed:
    assert ended.code == code, ended.text
    assert not ended.orphans, ended.text
    for part in parts:
        assert part in ended.err, ended.text
    return ended


def test_a_refusal_by_the_real_command_is_the_same(place: Path) -> None:
    ended = ended_with(run_lockstep("train", "mnits", cwd=place, fresh=True), 2, "unknown recipe 'mnits'")
    checked(ended.err)
    assert ended.out == ""


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_truncated_image_is_named_by_file_and_sample(place: Path, nproc: int) -> None:
    write_folders(place / "flowers")
    for image in sorted((place / "flowers/train/bee").iterdir())[1:2]:
        image.write_bytes(image.read_bytes()[:-200])
    flags = f"--nproc {nproc} --data-dir flowers --out run --model mlp --image-size 32 --batch-size 4 --workers 1"
    ended = ended_with(lockstep("train", "folder", *flags.split(), cwd=place).end(timeout=120), 2)
    message = checked(ended.err)
    assert re.search(r"flowers/train/bee/1\.\w+ \(sample \d+\)", message), message
    assert nproc == 1 or re.search(r"rank [01]: ", message)


def test_missing_data_on_two_processes_is_told_by_the_one_that_looked(place: Path) -> None:
    ended = ended_with(
        run_lockstep(*["train", "mnist", "--nproc", "2", "--data-dir", "sets", "--out", "run"], cwd=place), 2
    )
    assert "rank 0: mnist: train-images-idx3-ubyte" in checked(ended.err)
    assert not (place / "run").exists()
    assert not (place / "sets").exists()


def test_where_one_worker_fails_its_own_error_is_told_with_its_rank(place: Path) -> None:
    ended = ended_with(run_lockstep(*["train", "--nproc", "2", "--model", "mine:net", "--out", "run"], cwd=place), 1)
    assert ended.err.count("Traceback") == 1, ended.text  # the user's code: where it raised is worth a look
    assert ended.err.endswith("lockstep: rank 1: RuntimeError: no such luck on this rank\n"), ended.text
    assert not (place / "run").exists()


def test_an_error_of_the_user_s_data_set_on_all_ranks_is_told_once(place: Path) -> None:
    ended = ended_with(run_lockstep(*["train", "--nproc", "2", "--dataset", "mine:without_files"], cwd=place), 1)
    assert ended.err.count("Traceback") == 1, ended.text
    assert re.search(r"lockstep: rank [01]: FileNotFoundError: my files are on the other disk\n$", ended.err)


Journal = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def running(place: Path) -> Iterator[Callable[..., tuple[Command, Journal]]]:
    """Start an endless run and wait until it has evaluated once."""
    started: list[Command] = []

    def start(nproc: int, *flags: str, fresh: bool = False) -> tuple[Command, Journal]:
        endless = f"--epochs 100000 --nproc {nproc} --threads 1 --out run --max-restarts 0"
        command = lockstep("train", *endless.split(), *flags, cwd=place, fresh=fresh)
        started.append(command)

        def journal() -> list[dict[str, Any]]:
            path = place / "run/journal.jsonl"
            return read(path) if path.exists() else []

        command.until(lambda: any(record["kind"] == "eval" for record in journal()), 120)
        return command, journal

    yield start
    for command in started:
        if command.process.poll() is None:
            command.end(timeout=0)


def assert_interrupted(ended: Completed, journal: Journal, code: int) -> None:
    assert ended.code == code, ended.text
    assert not ended.orphans, ended.text
    assert "Traceback" not in ended.err, ended.text
    assert journal()[-1]["kind"] == "end"
    assert journal()[-1]["status"] == "interrupted"


@pytest.mark.parametrize(("nproc", "flags"), [(1, ("--loader", "streaming", "--workers", "1")), (2, ())])
def test_ctrl_c(running: Any, nproc: int, flags: tuple[str, ...]) -> None:
    command, journal = running(nproc, *flags)
    command.signal_group(signal.SIGINT)
    assert_interrupted(command.end(30), journal, 130)


@pytest.mark.slow
def test_an_interrupt_of_the_launcher_alone(running: Any) -> None:
    command, journal = running(2)
    command.signal(signal.SIGINT)
    assert_interrupted(command.end(30), journal, 130)


@pytest.mark.slow
def test_ctrl_c_while_the_workers_start(place: Path) -> None:
    command = lockstep("train", "--nproc", "2", "--out", "run", cwd=place, fresh=True)
    command.until(lambda: len(command.workers()) == 2)
    command.signal_group(signal.SIGINT)
    ended = command.end(60)
    assert (ended.code, ended.orphans) == (130, ()), ended.text
    assert ended.err == "lockstep: interrupted\n", ended.text
    journal = place / "run/journal.jsonl"  # there where this process came late to it
    assert read(journal)[-1]["status"] == "interrupted" if journal.exists() else not (place / "run").exists()


@pytest.mark.parametrize(("nproc", "number", "code"), [(1, signal.SIGTERM, 143), (2, signal.SIGUSR1, 138)])
def test_sigterm_and_sigusr1_end_with_a_checkpoint(running: Any, nproc: int, number: signal.Signals, code: int) -> None:
    """SIGUSR1: how Slurm says that a job's time is nearly over, where the launcher is its one task on the node."""
    command, journal = running(nproc)
    command.signal(number)
    assert_interrupted(command.end(30), journal, code)
    *_, checkpoint, end = journal()
    assert (checkpoint["kind"], checkpoint["step"]) == ("checkpoint", end["steps"])


@pytest.mark.slow
def test_workers_do_not_outlive_a_launcher_that_was_killed(running: Any) -> None:
    command, _ = running(2, "--loader", "streaming", "--workers", "1", fresh=True)
    assert len(command.family()) > 2
    command.signal(signal.SIGKILL)
    ended = command.end(30)
    assert not ended.orphans, ended.text


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_is_named_with_its_signal(running: Any, rank: int) -> None:
    command, journal = running(2)
    command.signal(signal.SIGKILL, command.workers()[rank])
    ended = command.end(60)
    ended_with(ended, 1, f"rank {rank}: killed by SIGKILL", "out of memory")
    assert ended.err.count("lockstep: ") == 1
    if rank == 1:
        assert journal()[-1]["status"] == "failed"


def test_a_run_under_nohup_goes_on_when_the_terminal_closes(place: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does; children inherit it
    try:
        command = lockstep("train", "--nproc", "2", "--epochs", "3", "--out", "run", cwd=place)
    finally:
        signal.signal(signal.SIGHUP, before)
    command.until(lambda: len(command.workers()) == 2)
    command.signal_group(signal.SIGHUP)
    ended = command.end(120)
    assert (ended.code, ended.err) == (0, ""), ended.text
    assert (place / "run/weights/final.safetensors").is_file()
