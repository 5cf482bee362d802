"""The same run under real launchers: one ledger and, in exact mode, one digest of the weights."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep.watch.journal import read
from tests.processes import Command

pytestmark = pytest.mark.integration
TRAIN = ("train", "digits", "--shards", "4", "--epochs", "2", "--threads", "1", "--fraction", "0.2")
LOCKSTEP = (sys.executable, "-m", "lockstep")


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm of one node, this machine, as root; yields the environment that its commands want."""
    if missing := [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)} here (Debian's slurm-wlm and munge have them)")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons want root here")
    host, conf = socket.gethostname(), folder / "slurm.conf"
    key, wire = folder / "munge.key", folder / "munge.socket"
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("", 0))
            ports.append(free.getsockname()[1])
    conf.write_text(
        f"""ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={wire}
CryptoType=crypto/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmUser=root
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
    )
    environment = {"SLURM_CONF": str(conf)}
    with ExitStack() as stack:
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        own = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "seed", "log")]
        for argv in (
            ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={wire}", *own],
            ["slurmctld", "-D", "-f", str(conf)],
            ["slurmd", "-D", "-f", str(conf)],
        ):
            daemon = subprocess.Popen(
                argv, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
            time.sleep(1)
        _until_idle(os.environ | environment)
        yield environment


def _until_idle(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        if seen.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    raise AssertionError(f"Slurm's node did not come up: {seen.stdout}{seen.stderr}")


def trained(
    folder: Path, *launcher: str, flags: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> tuple[str, str]:
    """Ledger and weights digest of a run under a launcher; checks that it was one run of two processes."""
    out = folder / (Path(launcher[0]).name if launcher else "own")
    ended = Command(*launcher, *LOCKSTEP, *TRAIN, *flags, "--out", str(out), env=env).end(timeout=240)
    assert ended.code == 0, ended.text
    assert not ended.orphans
    assert ended.out.count("test accuracy") == 1, ended.text
    runs = [r for r in read(out / "journal.jsonl") if r["kind"] in ("run", "end")]
    assert [r["kind"] for r in runs] == ["run", "end"]
    assert runs[-1]["processes"] == 2
    return runs[-1]["ledger_sha256"], runs[-1]["weights_sha256"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return trained(tmp_path_factory.mktemp("own"), flags=("--nproc", "2"))


def test_mpirun_starts_the_same_run(tmp_path: Path, own: tuple[str, str]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian's openmpi-bin has it)")
    quiet = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert trained(tmp_path, "mpirun", "--oversubscribe", "-np", "2", env=quiet) == own


def test_srun_starts_the_same_run(tmp_path: Path, own: tuple[str, str]) -> None:
    with slurm(tmp_path) as environment:
        assert trained(tmp_path, "srun", "-n2", env=environment) == own
