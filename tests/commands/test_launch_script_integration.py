"""Job files at work: a real Slurm job, torchrun's lines, and a manifest against the operator's published schema."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.journals import read
from tests.slurm import slurm
from tests.subprocesses import Command, Ended, run_lockstep

pytestmark = pytest.mark.integration
TRAIN = ("--exact", "4", "--threads", "1", "--nproc", "2")
LONG = ("--epochs", "8", *TRAIN)
_UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED")
SCRIPTS = str(Path(sys.executable).parent)
PATH = {"PATH": f"{SCRIPTS}:{os.environ['PATH']}"}

# Nets that trouble a job in its first attempt: too slow for its limit, or stuck on the way.
NETS = """
import os, time
from lockstep.models.small import digits_net

FIRST = "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
FIRST = FIRST and not os.path.exists("fast")

def slow(in_channels, num_classes, image_size):
    net = digits_net(in_channels, num_classes, image_size)
    if FIRST:
        net.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    return net

def stuck(in_channels, num_classes, image_size):
    net = digits_net(in_channels, num_classes, image_size)
    passes = iter(range(300))

    def stand(*_):
        if next(passes, None) is None:
            time.sleep(600)

    if FIRST:
        net.register_forward_pre_hook(stand)
    return net
"""


class Job:
    """A submitted job.sh."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, os.environ | PATH | environment
        self.number = self.command("sbatch", "--parsable", "job.sh").strip()

    def command(self, *argv: str) -> str:
        ended = subprocess.run(argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=30)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def described(self) -> dict[str, str]:
        """The entries of `scontrol show job`."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "show", "job", self.number)))

    def until_a_checkpoint(self) -> None:
        """Of the run in its folder `run`."""
        deadline = time.monotonic() + 60
        journal = self.folder / "run" / "journal.jsonl"
        while not (journal.exists() and checkpoints(self.folder / "run")):
            assert time.monotonic() < deadline, self.described()
            time.sleep(0.2)

    def until_it_ends(self, seconds: float) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while (seen := self.described())["JobState"] in _UNDER_WAY:
            assert time.monotonic() < deadline, seen
            time.sleep(0.5)
        return seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, int]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run_lockstep("train", "digits", *LONG, "--out", "run", cwd=folder, timeout=120)
    assert ended.code == 0, ended.text
    return digests(folder / "run")


def job_file(folder: Path, net: str, minutes: int) -> None:
    """Write a job of so many minutes, which is told 15 seconds before its end."""
    (folder / "nets.py").write_text(NETS)
    flags = ("--model", f"nets:{net}", *LONG, "--checkpoint-every", "10steps", "--out", "run")
    limits = ("--time", str(minutes), "--signal-before", "15", "--file", "job.sh")
    ended = run_lockstep("launch-script", "slurm", "digits", *flags, *limits, cwd=folder)
    assert ended.code == 0, ended.text


def attempts(folder: Path) -> list[tuple[int, str]]:
    """Of each of a run's attempts, the step that it began with and how it ended; empty where it could not say."""
    found: list[tuple[int, str]] = []
    for record in read(folder / "journal.jsonl"):
        if record["kind"] == "run":
            found.append((record["resumed_from"], ""))
        elif record["kind"] == "end":
            found[-1] = (found[-1][0], record["status"])
    return found


def checkpoints(folder: Path) -> list[int]:
    return [record["step"] for record in read(folder / "journal.jsonl") if record["kind"] == "checkpoint"]


@pytest.fixture
def life(tmp_path: Path, undisturbed: tuple[str, str, int]) -> Any:
    """A job's whole life: its output, how often it was queued again, and its run's attempts."""

    def lived(
        net: str, minutes: int, meanwhile: Callable[[Job], object] = lambda _: None
    ) -> tuple[str, int, list[tuple[int, str]]]:
        job_file(tmp_path, net, minutes)
        with slurm(tmp_path) as environment:
            job = Job(tmp_path, environment)
            meanwhile(job)
            last = job.until_it_ends(180)
        said = (tmp_path / f"digits-{job.number}.out").read_text()
        assert (last["JobState"], last["ExitCode"]) == ("COMPLETED", "0:0"), said
        assert digests(tmp_path / "run") == undisturbed
        found = attempts(tmp_path / "run")
        assert (found[0][0], found[-1][1]) == (0, "completed")
        assert all(f"resumed from step {step} " in said for step, _ in found[1:])
        return said, int(last["Restarts"]), found

    return lived


def test_a_slurm_job_stops_before_its_limit_comes_back_by_itself_and_finishes(tmp_path: Path, life: Any) -> None:
    said, restarts, found = life("slow", 1)
    assert restarts >= len(found) - 1 >= 1
    assert [status for _, status in found] == ["interrupted"] * (len(found) - 1) + ["completed"]
    for step, _ in found[1:]:
        assert step > 0
        assert f"stopped by SIGUSR1 after step {step};" in said
        assert step in checkpoints(tmp_path / "run")


def test_a_slurm_job_that_heeds_no_signal_is_killed_at_its_limit_comes_back_and_finishes(life: Any) -> None:
    said, restarts, (first, second) = life("stuck", 1)
    assert restarts == 1
    assert "DUE TO JOB REQUEUE" in said
    assert first[1] == ""
    assert second[0] > 60


def test_a_slurm_job_with_a_killed_process_starts_again_where_it_is(tmp_path: Path, life: Any) -> None:
    def kill_rank_1(job: Job) -> None:
        job.until_a_checkpoint()
        listed = job.command("scontrol", "listpids", f"{job.number}.0").splitlines()[1:]
        (pid,) = [int(line.split()[0]) for line in listed if line.split()[4] == "1"]  # its global number
        assert b"lockstep" in Path(f"/proc/{pid}/cmdline").read_bytes()
        (tmp_path / "fast").touch()
        os.kill(pid, signal.SIGKILL)

    _, restarts, (first, second) = life("slow", 10, kill_rank_1)  # far from its limit
    assert restarts == 0
    assert first[1] != "completed"
    assert second[0] > 0


def test_a_slurm_job_makes_room_for_another_comes_back_and_finishes(life: Any) -> None:
    def call_for_its_place(job: Job) -> None:
        job.until_a_checkpoint()
        job.command("sbatch", "--partition", "urgent", "--ntasks", "2", "--wrap", "sleep 1")

    said, restarts, (first, second) = life("slow", 10, call_for_its_place)
    assert restarts == 1
    assert first[1] == "interrupted"
    assert f"stopped by SIGTERM after step {second[0]};" in said


def digests(folder: Path) -> tuple[str, str, int]:
    end = read(folder / "journal.jsonl")[-1]
    return end["ledger_sha256"], end["weights_sha256"], end["processes"]


def written(target: str, *flags: str, cwd: Path) -> str:
    ended = run_lockstep("launch-script", target, "digits", *flags, cwd=cwd)
    assert ended.code == 0, ended.text
    return ended.out


def together(lines: list[list[str]], cwd: Path, env: list[dict[str, str]] | None = None) -> list[Ended]:
    """Run each machine's command, all at once."""
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", **PATH}  # torchrun warns of its own doings
    started = [Command(*line, cwd=cwd, env=quiet | more) for line, more in zip(lines, env or [{}, {}], strict=True)]
    return [command.end(120) for command in started]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, int]:
    folder = tmp_path_factory.mktemp("own")
    assert run_lockstep("train", *TRAIN, "--epochs", "2", "--out", "run", cwd=folder, timeout=120).code == 0
    return digests(folder / "run")


@pytest.mark.parametrize("elastic", [(), ("--min-nnodes", "1")])
def test_torchrun_lines_are_one_run(tmp_path: Path, own: tuple[str, str, int], elastic: tuple[str, ...]) -> None:
    flags = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--exact", "4", "--threads", "1", "--nproc", "1")
    text = written(
        "torchrun",
        *flags,
        *elastic,
        "--epochs",
        "2",
        "--name",
        tmp_path.name.replace("_", "-"),
        "--out",
        "run",
        cwd=tmp_path,
    )
    lines = [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]
    ends = together(lines, tmp_path)
    assert [ended.code for ended in ends] == [0, 0], "\n".join(ended.text for ended in ends)
    assert digests(tmp_path / "run") == own


def test_a_pods_command_trains_with_what_the_operator_sets(tmp_path: Path, own: tuple[str, str, int]) -> None:
    """RANK and WORLD_SIZE, which count pods there, are in the way of nothing."""
    out = str(tmp_path / "run")
    text = written(
        "kubernetes", "--image", "x", *TRAIN[:-1], "1", "--nnodes", "2", "--epochs", "2", "--out", out, cwd=tmp_path
    )
    spec = json.loads(text)["spec"]
    command = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"]
    port = str(23_456 + os.getpid() % 1000)
    pods = [
        {"RANK": str(rank), "PET_NODE_RANK": str(rank), "WORLD_SIZE": "2", "PET_NNODES": "2"}
        | {"PET_NPROC_PER_NODE": spec["nprocPerNode"], "MASTER_ADDR": "127.0.0.1", "PET_MASTER_ADDR": "127.0.0.1"}
        | {"MASTER_PORT": port, "PET_MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}
        for rank in range(2)
    ]
    ends = together([command, command], tmp_path, pods)
    assert [ended.code for ended in ends] == [0, 0], "\n".join(ended.text for ended in ends)
    assert digests(tmp_path / "run") == own


# What the project publishes: models generated from the operator's OpenAPI document. A field that a model does not know
# is lost on the way through it; one of another type, or a missing one, is refused.
CHECK = """
import json, sys
from types import SimpleNamespace
from kubeflow.training import KubeflowOrgV1PyTorchJob
from kubeflow.training.api_client import ApiClient
manifest, client = json.load(sys.stdin), ApiClient()
read = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1PyTorchJob")
known = client.sanitize_for_serialization(read)
def lost(given, known, where=""):
    pairs = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ()
    for key, value in pairs:
        missing = key not in known if isinstance(given, dict) else key >= len(known)
        yield from [f"{where}/{key}: unknown"] if missing else lost(value, known[key], f"{where}/{key}")
    if not pairs and given != known:
        yield f"{where}: {given!r} became {known!r}"
sys.exit("\\n".join(lost(manifest, known)) or None)
"""


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's Python models, in a folder."""
    folder = tmp_path_factory.mktemp("schemas")
    wanted = ["kubeflow-training==1.9.4"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *wanted]
    ended = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    if ended.returncode:
        pytest.skip(f"pip can't install {' '.join(wanted)}: {ended.stderr.strip().splitlines()[-1]}")
    return folder


def checked(manifest: str, schemas: Path) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(schemas), "PATH": os.environ["PATH"]}
    return subprocess.run(
        [sys.executable, "-c", CHECK], env=env, input=manifest, capture_output=True, text=True, timeout=60
    )


LARGE = ("--nnodes", "3", "--gpus-per-node", "4", "--memory", "64Gi", "--batch-size", "512")
BROKEN = [
    ("restartPolicy", "restartPolcy", "restartPolcy: unknown"),
    ("pytorchReplicaSpecs", "replicaSpecs", "must not be `None`"),
    ('"backoffLimit": 3', '"backoffLimit": "often"', "invalid literal for int"),
]


def test_the_published_schema_takes_the_manifest_and_sees_a_broken_one(schemas: Path, tmp_path: Path) -> None:
    plain = written("kubernetes", "--image", "me/lockstep:1", cwd=tmp_path)
    for manifest in (plain, written("kubernetes", "--image", "me/lockstep:1", *LARGE, cwd=tmp_path)):
        ended = checked(manifest, schemas)
        assert ended.returncode == 0, ended.stderr
    for right, wrong, message in BROKEN:
        assert right in plain
        ended = checked(plain.replace(right, wrong), schemas)
        assert ended.returncode != 0
        assert message in ended.stderr, ended.stderr
