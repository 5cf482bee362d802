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
from typing import NamedTuple

import pytest

from tests.journals import read
from tests.slurm import slurm
from tests.subprocesses import Command, Completed, run_lockstep

pytestmark = pytest.mark.integration
TRAIN = ("--exact", "4", "--threads", "1", "--nproc", "2")
LONG = ("--epochs", "8", *TRAIN)
_UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED")
SCRIPTS = str(Path(sys.executable).parent)
PATH = {"PATH": f"{SCRIPTS}:{os.environ['PATH']}"}

# Nets that trouble a job in its first attempt: slower with each pass, and too slow for its limit, or stuck on the way.
NETS = """
import itertools, os, pathlib, time
from lockstep.models.small import digits_net

FIRST = "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
FIRST = FIRST and not os.path.exists("fast")

def slow(in_channels, num_classes, image_size):
    net = digits_net(in_channels, num_classes, image_size)
    passes = itertools.count()
    if FIRST:
        net.register_forward_pre_hook(lambda *_: time.sleep(0.01 * next(passes)))
    return net

def stuck(in_channels, num_classes, image_size):
    net = digits_net(in_channels, num_classes, image_size)
    passes = iter(range(300))

    def stand(*_):
        if next(passes, None) is None:
            pathlib.Path("stuck").touch()
            time.sleep(600)

    if FIRST:
        net.register_forward_pre_hook(stand)
    return net
"""


class Job:
    """A submitted job.sh that trains such a net, and is told 15 seconds before its end."""

    def __init__(self, folder: Path, net: str, environment: dict[str, str], partition: str = "main") -> None:
        self.folder, self.environment = folder, os.environ | PATH | environment
        folder.mkdir()
        (folder / "nets.py").write_text(NETS)
        flags = ("--model", f"nets:{net}", *LONG, "--checkpoint-every", "10steps", "--out", "run")
        limits = ("--time", "10", "--signal-before", "15", "--file", "job.sh")
        ended = run_lockstep("launch-script", "slurm", "digits", *flags, *limits, cwd=folder)
        assert ended.code == 0, ended.text
        self.number = self.command("sbatch", "--parsable", "--partition", partition, "job.sh").strip()

    def command(self, *argv: str) -> str:
        ended = subprocess.run(argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=30)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def described(self) -> dict[str, str]:
        """The entries of `scontrol show job`."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "show", "job", self.number)))

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline, self.described()
            time.sleep(0.2)

    def checkpoints(self) -> list[int]:
        """Of its run, steps."""
        return checkpoints(self.folder / "run") if (self.folder / "run" / "journal.jsonl").exists() else []

    def limit(self) -> None:
        """End it at the first whole minute of its life that is more than 20 seconds away."""
        hours, minutes, seconds = map(int, self.described()["RunTime"].split(":"))
        limit = (3600 * hours + 60 * minutes + seconds + 20) // 60 + 1
        self.command("scontrol", "update", f"JobId={self.number}", f"TimeLimit={limit}")

    def life(self, undisturbed: tuple[str, str, int]) -> "Life":
        """To its end, which has to be that of a run that nobody disturbed."""
        self.until(lambda: self.described()["JobState"] not in _UNDER_WAY)
        last = self.described()
        said = (self.folder / f"digits-{self.number}.out").read_text()
        assert (last["JobState"], last["ExitCode"]) == ("COMPLETED", "0:0"), said
        assert digests(self.folder / "run") == undisturbed
        found = attempts(self.folder / "run")
        assert (found[0][0], found[-1][1]) == (0, "completed")
        assert all(f"resumed from step {step} " in said for step, _ in found[1:])
        return Life(said, int(last["Restarts"]), found, self.checkpoints())


class Life(NamedTuple):
    """A job's whole life."""

    said: str
    restarts: int  # how often it was queued again
    attempts: list[tuple[int, str]]
    checkpoints: list[int]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, int]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run_lockstep("train", "digits", *LONG, "--out", "run", cwd=folder, timeout=120)
    assert ended.code == 0, ended.text
    return digests(folder / "run")


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


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, undisturbed: tuple[str, str, int]) -> tuple[Life, Life]:
    """Two jobs at once, since each waits for its limit: a slow one, and one that is stuck."""
    folder = tmp_path_factory.mktemp("limited")
    with slurm(folder, cpus=4) as environment:
        slow, stuck = jobs = [Job(folder / net, net, environment) for net in ("slow", "stuck")]
        slow.until(slow.checkpoints)
        stuck.until((stuck.folder / "stuck").exists)
        for job in jobs:
            job.limit()
        for job in jobs:
            job.until(lambda: job.described()["Restarts"] != "0")  # noqa: B023
            job.command("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")  # enough on any machine
        return slow.life(undisturbed), stuck.life(undisturbed)


def test_a_slurm_job_stops_before_its_limit_comes_back_by_itself_and_finishes(limited: tuple[Life, Life]) -> None:
    said, restarts, found, checkpoints = limited[0]
    assert restarts >= len(found) - 1 >= 1
    assert [status for _, status in found] == ["interrupted"] * (len(found) - 1) + ["completed"]
    for step, _ in found[1:]:
        assert step > 0
        assert f"stopped by SIGUSR1 after step {step};" in said
        assert step in checkpoints


def test_a_slurm_job_that_heeds_no_signal_is_killed_at_its_limit_comes_back_and_finishes(
    limited: tuple[Life, Life],
) -> None:
    said, restarts, (first, second), _ = limited[1]
    assert restarts == 1
    assert "DUE TO JOB REQUEUE" in said
    assert first[1] == ""
    assert second[0] > 60


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory, undisturbed: tuple[str, str, int]) -> tuple[Life, Life]:
    """Two jobs at once, far from their limits: of one a process is killed, the other one makes room for a third."""
    folder = tmp_path_factory.mktemp("struck")
    with slurm(folder, cpus=4) as environment:
        killed = Job(folder / "killed", "slow", environment, "urgent")
        moved = Job(folder / "moved", "slow", environment)
        moved.until(moved.checkpoints)
        moved.command("sbatch", "--partition", "urgent", "--ntasks", "2", "--wrap", "sleep 1")
        killed.until(killed.checkpoints)
        listed = killed.command("scontrol", "listpids", f"{killed.number}.0").splitlines()[1:]
        (pid,) = [int(line.split()[0]) for line in listed if line.split()[4] == "1"]  # its global number
        assert b"lockstep" in Path(f"/proc/{pid}/cmdline").read_bytes()
        (killed.folder / "fast").touch()
        os.kill(pid, signal.SIGKILL)
        return killed.life(undisturbed), moved.life(undisturbed)


def test_a_slurm_job_with_a_killed_process_starts_again_where_it_is(struck: tuple[Life, Life]) -> None:
    _, restarts, (first, second), _ = struck[0]
    assert restarts == 0
    assert first[1] != "completed"
    assert second[0] > 0


def test_a_slurm_job_makes_room_for_another_comes_back_and_finishes(struck: tuple[Life, Life]) -> None:
    said, restarts, (first, second), _ = struck[1]
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


def together(lines: list[list[str]], cwd: Path, env: list[dict[str, str]] | None = None) -> list[Completed]:
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
    flags = ("--nnodes", "2", "--master-addr", "127.0.0.1", *TRAIN[:-1], "1", *elastic, "--epochs", "2")
    name = tmp_path.name.replace("_", "-")
    text = written("torchrun", *flags, "--name", name, "--out", "run", cwd=tmp_path)
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
