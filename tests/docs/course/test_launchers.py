"""The course's programs under real launchers, and what step 13 reads of each."""

import runpy

import pytest

import consequences
from tests.docs.course.programs import run

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
# torchrun inside of Slurm's job: one task a machine, and torchrun's numbers count
BOTH = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", **TORCHRUN}


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM, MPI, BOTH], ids=["torchrun", "Slurm", "MPI", "both"])
def test_a_launchers_variables(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    place = runpy.run_path(str(consequences.program("13")))["place"]
    with pytest.raises(SystemExit, match="torchrun, srun or mpirun"):
        place()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert place() == [3, 4, 1]


@pytest.mark.integration
@pytest.mark.parametrize(("step", "flags"), [("03", ()), ("12", ("--file", consequences.FILE)), ("13", ())])
def test_torchrun_prints_what_the_pages_show(step: str, flags: tuple[str, ...]) -> None:
    out = consequences.launch(step, 2, flags)
    assert out.startswith(run(step, 2, flags))
