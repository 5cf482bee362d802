"""Who a process is under mpirun, srun and others, and how ranks without a port find each other."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistError

from lockstep.config import Execution
from lockstep.distributed.environment import JOB, first_host, launcher_ranks, over_slurm_nodes, port_of, tasks_per_node
from lockstep.distributed.rendezvous import open_store
from lockstep.errors import UserError

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "123@1"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
ALONE = {name: "1" if name.endswith("SIZE") else "0" for name in OPEN_MPI if "WORLD" in name}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "5"}
SLURM |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
SLURM |= {"SLURM_STEP_NODELIST": "gpu[03-04,09]"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@pytest.mark.parametrize(
    ("environ", "values"),
    [
        (OPEN_MPI | {"MASTER_ADDR": "10.0.0.1"}, ("3", "4", "1", "2", "10.0.0.1")),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"},
            ("3", "4", "3", "4", "127.0.0.1"),
        ),
        (SLURM, ("2", "5", "0", "2", "gpu03")),
        (SLURM | {"MASTER_ADDR": "head"}, ("2", "5", "0", "2", "head")),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_LOCALID": "2"},
            ("2", "5", "2", "5", "127.0.0.1"),
        ),
        (PMI, ("1", "2", "1", "2", "127.0.0.1")),
        (PMI | SLURM, ("1", "2", "1", "2", "127.0.0.1")),  # another MPI's ranks, whose helpers srun started
        (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "5"}, ("2", "5", "0", "2", "gpu03")),  # srun --mpi=pmi2
        (OPEN_MPI | SLURM | {"MASTER_ADDR": "h"}, ("3", "4", "1", "2", "h")),
    ],
)
def test_a_launcher_s_variables_become_torchrun_s(environ: dict[str, str], values: tuple[str, ...]) -> None:
    adopted = dict(environ)
    assert launcher_ranks(adopted)
    assert tuple(adopted[name] for name in NAMES) == values
    assert int(adopted["MASTER_PORT"]) == port_of(adopted[JOB])
    again = dict(adopted)
    assert launcher_ranks(again) == launcher_ranks(adopted)
    assert again == adopted, "a second look changes nothing"
    given_port = environ | {"MASTER_PORT": "4321"}
    assert launcher_ranks(given_port)
    assert given_port["MASTER_PORT"] == "4321"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        OPEN_MPI | ALONE,
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script, not a step
        SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"},  # one task a node
    ],
    ids=["nothing", "alone", "batch script", "one a node"],
)
def test_who_is_alone_has_no_place(environ: dict[str, str]) -> None:
    found = dict(environ)
    assert not launcher_ranks(found)
    assert found == environ


@pytest.mark.parametrize("whole", [OPEN_MPI | {"MASTER_ADDR": "h"}, SLURM, PMI], ids=["mpirun", "srun", "pmi"])
def test_torn_and_contradictory_variables_are_named(whole: dict[str, str]) -> None:
    rank = next(name for name in whole if name.endswith(("_RANK", "PROCID")))
    size = next(name for name in whole if "SIZE" in name or "NUM_TASKS" in name)
    with pytest.raises(UserError, match=f"{size} not set"):
        launcher_ranks({name: value for name, value in whole.items() if name != size})
    for wrong in ("9", "x"):
        with pytest.raises(UserError, match=f"{rank}={wrong}"):
            launcher_ranks(whole | {rank: wrong})
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):  # which ranks on several hosts need
        launcher_ranks(dict(OPEN_MPI))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_tasks_per_node_round_trips(counts: list[int]) -> None:
    runs: list[tuple[int, int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1] = (count, runs[-1][1] + 1)
        else:
            runs.append((count, 1))
    assert tasks_per_node(",".join(f"{c}(x{n})" if n > 1 else str(c) for c, n in runs)) == counts


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-05,9],x", "gpu03"), ("r[1,2]n-ib,z", "r1n-ib"), ("n-1.site", "n-1.site")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_one_task_on_each_node_starts_its_node_s_processes() -> None:
    environ = SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": "2"}
    found = over_slurm_nodes(Execution(nproc=4), environ)
    assert (found.nproc, found.nnodes, found.node_rank, found.master_addr) == (4, 3, 2, "gpu03")
    assert found.master_port == over_slurm_nodes(Execution(), environ | {"SLURM_NODEID": "0"}).master_port
    for other in ({}, SLURM):
        assert over_slurm_nodes(Execution(nproc=4), other) == Execution(nproc=4)


def test_ranks_meet_at_their_job_s_port_and_not_those_of_another_job() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), JOB: "own"}
    with ThreadPoolExecutor(2) as threads:
        first, second = [threads.submit(open_store, environ, rank, 2, 2, 20.0) for rank in range(2)]
        second.result().set("word", "said")
        assert first.result().get("word") == b"said"
    with pytest.raises(DistError):  # at the same port by chance: it hears no answer
        open_store(environ | {JOB: "another"}, 1, 2, 2, 0.5)
    with pytest.raises(OSError, match="in use"):
        open_store(environ | {JOB: "another"}, 0, 2, 2, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_NODEID": ""}, "SLURM_NODEID not set"),
        ({"SLURM_NODEID": "x"}, "not a number: SLURM_NODEID=x"),
        ({"SLURM_NODEID": "7"}, "contradictory .* SLURM_NODEID=7"),
        ({"MASTER_PORT": "http"}, "not a number: MASTER_PORT=http"),
    ],
)
def test_slurm_s_variables_that_are_missing_or_no_numbers(change: dict[str, str], message: str) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    with pytest.raises(UserError, match=message):
        over_slurm_nodes(Execution(), {**SLURM, **step, **change})
    with_ranks = {**SLURM, **step, **change, "RANK": "0"}  # torchrun, started on each node
    assert over_slurm_nodes(Execution(), with_ranks) == Execution()
