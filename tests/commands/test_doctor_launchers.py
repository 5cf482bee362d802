"""Variables of launchers: none, half of them, leftovers, and Slurm's geometries."""

import pytest

from lockstep.commands.doctor import launchers
from lockstep.commands.doctor.finding import Finding

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_JOB_CPUS_PER_NODE": "16"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def slurm(environ: dict[str, str], gpus: int = 0, usable: int = 16) -> list[Finding]:
    return list(launchers.slurm(environ, gpus, usable))


def test_nothing_left() -> None:
    assert launchers.launcher({"PATH": "x"}).status == "ok"
    found = launchers.launcher({"MASTER_ADDR": "node1"})
    assert found.status == "ok"
    assert "MASTER_ADDR=node1" in found.message


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_half_an_environment(missing: str) -> None:
    found = launchers.launcher({name: value for name, value in TORCHRUN.items() if name != missing})
    assert found.status == "fail"
    assert f"{missing} not" in found.message
    assert "unset" in found.remedy


def test_a_contradiction() -> None:
    assert launchers.launcher({**TORCHRUN, "RANK": "9"}).status == "fail"
    assert launchers.launcher({**TORCHRUN, "RANK": "one"}).status == "fail"
    assert launchers.launcher({"OMPI_COMM_WORLD_RANK": "0"}).status == "fail"


def test_a_whole_environment_of_somebody_elses_run() -> None:
    environ = dict(TORCHRUN)
    found = launchers.launcher(environ)
    assert found.status == "warn"
    assert "RANK=1 of WORLD_SIZE=4 (torchrun's variables): a run from here would wait for 3 others" in found.message
    assert "unset RANK WORLD_SIZE" in found.remedy
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    found = launchers.launcher(step)
    assert (found.status, "srun's" in found.message) == ("warn", True)
    assert environ == TORCHRUN
    assert "RANK" not in step  # it is asked, not adopted


def test_outside_slurm() -> None:
    assert [each.status for each in slurm({})] == ["skipped"]


def test_a_script_that_forgot_srun() -> None:
    (found,) = slurm({**BATCH, "SLURM_TASKS_PER_NODE": "4", "SLURM_NTASKS": "4"}, gpus=4)
    assert found.status == "warn"
    assert "this runs once, on the first node, not as 4 tasks" in found.message
    assert "srun lockstep train" in found.remedy


@pytest.mark.parametrize("environ", [
    {**BATCH, "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"},
    {**STEP, "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1"},
    {**BATCH, "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "1"},
])  # fmt: skip
def test_one_task_on_two_nodes(environ: dict[str, str]) -> None:
    (found,) = slurm(environ, gpus=4)
    assert (found.status, found.message) == ("fail", "1 task(s) on 2 nodes: 1 node(s) stay idle")
    assert "--ntasks-per-node=1" in found.remedy


@pytest.mark.parametrize(("tasks", "gpus", "status"), [
    ("1", 4, "ok"), ("4", 4, "ok"), ("8", 4, "fail"), ("2", 4, "warn"), ("2", 0, "ok"), ("4,2", 4, "warn"),
])  # fmt: skip
def test_tasks_against_gpus(tasks: str, gpus: int, status: str) -> None:
    nodes = str(len(tasks.split(",")))
    found = slurm({**STEP, "SLURM_JOB_NUM_NODES": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks}, gpus, usable=16)
    assert [each.status for each in found] == [status]
    assert bool(found[0].remedy) == (status != "ok")


def test_the_gpus_that_slurm_counts_where_torch_sees_none() -> None:
    (found,) = slurm({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "1"})
    assert found.status == "fail"


def test_a_task_that_sees_its_own_gpu_alone_is_well() -> None:
    step = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert [each.status for each in slurm({**step, "SLURM_GPUS_ON_NODE": "4"}, gpus=1)] == ["ok"]
    assert [each.status for each in slurm(step, gpus=1)] == ["fail"]


def test_cores_of_a_task() -> None:
    step = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "4"}
    found = slurm(step, gpus=4, usable=1)
    assert [(each.check, each.status) for each in found] == [("Slurm cores", "warn"), ("Slurm", "ok")]
    assert found[0].message == "1 core(s) for each of 4 task(s), and the job has 16 on this node"
    assert "--cpus-per-task=4" in found[0].remedy
    assert [each.status for each in slurm(step, gpus=4, usable=4)] == ["ok"]
