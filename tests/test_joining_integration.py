"""The same run under real launchers: one ledger and, in exact mode, one digest of the weights."""

import shutil
import sys
from pathlib import Path

import pytest

from lockstep.watch.journal import read
from tests.processes import Command
from tests.slurm import slurm

pytestmark = pytest.mark.integration
TRAIN = ("train", "digits", "--shards", "4", "--epochs", "2", "--threads", "1", "--fraction", "0.2")
LOCKSTEP = (sys.executable, "-m", "lockstep")


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
    digests: tuple[str, str] = runs[-1]["ledger_sha256"], runs[-1]["weights_sha256"]
    print(f"\n{' '.join((*launcher, 'lockstep', *flags))}\n  ledger {digests[0]}\n  weights {digests[1]}")
    return digests


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return trained(tmp_path_factory.mktemp("own"), flags=("--nproc", "2"))


def test_torchrun_starts_the_same_run(tmp_path: Path, own: tuple[str, str]) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    assert trained(tmp_path, *torchrun) == own


def test_mpirun_starts_the_same_run(tmp_path: Path, own: tuple[str, str]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian's openmpi-bin has it)")
    quiet = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert trained(tmp_path, "mpirun", "--oversubscribe", "-np", "2", env=quiet) == own


def test_srun_starts_the_same_run(tmp_path: Path, own: tuple[str, str]) -> None:
    with slurm(tmp_path) as environment:
        assert trained(tmp_path, "srun", "-n2", env=environment) == own
