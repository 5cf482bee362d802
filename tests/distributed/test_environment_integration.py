"""The same run under real launchers: one ledger and, in exact mode, one digest of the weights."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.journals import read
from tests.slurm import slurm
from tests.subprocesses import Command

pytestmark = pytest.mark.integration
TRAIN = ("train", "digits", "--exact", "4", "--epochs", "2", "--threads", "1", "--fraction", "0.2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
MPIRUN = ("mpirun", "--oversubscribe", "-np", "2")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LOCKSTEP = (sys.executable, "-m", "lockstep")


def started(
    out: Path, *launcher: str, flags: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> tuple[Command, Path]:
    """A run under a launcher, and its folder."""
    command = (*launcher, *LOCKSTEP, *TRAIN, *flags, "--out", str(out))
    return Command(*command, env=env, warm=not launcher), out


def ended(command: Command, out: Path) -> tuple[str, str]:
    """Ledger and weights digest; checks that it was one run of two processes."""
    end = command.end(timeout=240)
    assert end.code == 0, end.text
    assert not end.orphans
    assert end.out.count("test accuracy") == 1, end.text
    runs = [r for r in read(out / "journal.jsonl") if r["kind"] in ("run", "end")]
    assert [r["kind"] for r in runs] == ["run", "end"]
    assert runs[-1]["processes"] == 2
    return runs[-1]["ledger_sha256"], runs[-1]["weights_sha256"]


def trained(
    folder: Path, *launcher: str, flags: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> tuple[str, str]:
    ledger, weights = ended(*started(folder / "run", *launcher, flags=flags, env=env))
    print(f"\n{' '.join((*launcher, 'lockstep', *flags))}\n  ledger {ledger}\n  weights {weights}")
    return ledger, weights


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return trained(tmp_path_factory.mktemp("own"), flags=("--nproc", "2"))


def test_torchrun_starts_the_same_run(tmp_path: Path, own: tuple[str, str]) -> None:
    assert trained(tmp_path, *TORCHRUN) == own


def test_mpirun_starts_the_same_run(tmp_path: Path, own: tuple[str, str]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian's openmpi-bin has it)")
    assert trained(tmp_path, *MPIRUN, env=AS_ROOT) == own


def test_srun_starts_the_same_run(tmp_path: Path, own: tuple[str, str]) -> None:
    with slurm(tmp_path) as environment:
        assert trained(tmp_path, "srun", "-n2", env=environment) == own


def test_jobs_at_once_on_one_host_do_not_meet(tmp_path: Path, own: tuple[str, str]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian's openmpi-bin has it)")
    own_place = "OMPI_MCA_orte_tmpdir_base"  # two that make Open MPI's folder for the host at once stop each other
    jobs = [
        *(started(out, *MPIRUN, env=AS_ROOT | {own_place: str(out)}) for out in (tmp_path / "mpi0", tmp_path / "mpi1")),
        started(tmp_path / "torchrun", *TORCHRUN),
        started(tmp_path / "own", flags=("--nproc", "2")),
    ]
    assert [ended(*job) for job in jobs] == [own] * len(jobs)
