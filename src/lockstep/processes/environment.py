"""Who a process is among those that mpirun, srun or another MPI's starter has started.

`adopt` says it in torchrun's variables, which all else reads. How the ranks find each other is `rendezvous`'s.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from lockstep.config import Execution
from lockstep.errors import UserError
from lockstep.processes.rendezvous import ports

JOB = "LOCKSTEP_JOB"  # of a run whose ranks find their port themselves; torchrun's runs have a port in MASTER_PORT


@dataclass(frozen=True)
class Place:
    """A process's place in a run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str  # rank 0's
    job: str  # a name that no other run on these hosts has at the same time

    def variables(self) -> dict[str, str]:
        """As torchrun would have set them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(ports(self.job)[0]),
            JOB: self.job,
        }


def adopt(environ: MutableMapping[str, str] = os.environ) -> None:
    """Where mpirun or srun started this process, add torchrun's variables; MASTER_ADDR and MASTER_PORT are respected.

    Raises:
        UserError: for a torn or contradictory environment, naming the variables.
    """
    if any(environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        return  # torchrun's, or a torn environment that the reader of these variables complains of
    found = place(environ)
    if found is None:
        return
    given = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    environ.update(found.variables() | given)
    if "MASTER_PORT" in given:
        del environ[JOB]


def place(environ: Mapping[str, str]) -> Place | None:
    """The place that an MPI or Slurm gave this process; None without one, where it is alone, or alone on its node.

    Open MPI comes first: its ranks may be started through srun, whose variables then count its helpers. A PMI that says
    something else than Slurm is another MPI's, started through srun likewise.
    """
    if environ.get("OMPI_COMM_WORLD_RANK"):
        found: Place | None = _open_mpi(environ)
    elif environ.get("SLURM_STEP_ID") and not _is_other_pmi(environ):
        found = _slurm(environ)
    elif environ.get("PMI_RANK"):
        found = _pmi(environ)
    else:
        return None
    return found if found is not None and found.size > 1 else None


def spread(execution: Execution, environ: Mapping[str, str] = os.environ) -> Execution:
    """The execution on all nodes of a Slurm step that has one task on each: the task starts its node's processes."""
    if execution.nnodes > 1 or _is_other_pmi(environ) or not environ.get("SLURM_STEP_ID"):
        return execution
    nodes = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(nodes) < 2 or set(nodes) != {1}:
        return execution
    return replace(
        execution,
        nnodes=len(nodes),
        node_rank=int(environ["SLURM_NODEID"]),
        master_addr=environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "")),
        master_port=int(environ.get("MASTER_PORT") or ports(_slurm_job(environ))[0]),
    )


def _is_other_pmi(environ: Mapping[str, str]) -> bool:
    """True where a PMI counts this process otherwise than Slurm does."""
    pmi, slurm = (
        tuple(environ.get(name) for name in names)
        for names in (("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    )
    return bool(pmi[0]) and pmi != slurm


def _open_mpi(environ: Mapping[str, str]) -> Place:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    return _placed(environ, names, f"mpi-{job}", "mpirun -x MASTER_ADDR=HOST-OF-RANK-0")


def _pmi(environ: Mapping[str, str]) -> Place:
    names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    return _placed(environ, names, f"pmi-{os.getppid()}", "mpiexec -genv MASTER_ADDR HOST-OF-RANK-0")


def _placed(environ: Mapping[str, str], names: list[str], job: str, remedy: str) -> Place:
    rank, size, local_rank, local_size = _numbers(environ, names)
    if local_size < size and not environ.get("MASTER_ADDR"):
        raise UserError(
            f"ranks on several hosts ({names[3]}={local_size} of {names[1]}={size}), and MASTER_ADDR is not set",
            f"Say where rank 0 is: {remedy}.",
        )
    return Place(rank, size, local_rank, local_size, environ.get("MASTER_ADDR") or "127.0.0.1", job)


def _slurm_job(environ: Mapping[str, str]) -> str:
    words = [environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    return f"slurm-{'.'.join(words)}"


def _slurm(environ: Mapping[str, str]) -> Place | None:
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"]
    rank, size, local_rank, node = _numbers(environ, names, local_size=False)
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(per_node) != size or not 0 <= node < len(per_node) or not 0 <= local_rank < per_node[node]:
        shown = " ".join(f"{name}={environ.get(name)}" for name in (*names, "SLURM_STEP_TASKS_PER_NODE"))
        raise UserError(f"a contradictory Slurm environment: {shown}", "Start with srun, which sets all of them.")
    if set(per_node) == {1}:
        return None  # see `spread`
    # on one node its name is not asked for: it need not resolve
    host = first_host(environ.get("SLURM_STEP_NODELIST", "")) if len(per_node) > 1 else "127.0.0.1"
    return Place(rank, size, local_rank, per_node[node], environ.get("MASTER_ADDR") or host, _slurm_job(environ))


def _numbers(environ: Mapping[str, str], names: list[str], local_size: bool = True) -> list[int]:
    """The values of rank, size, local rank and local size, or another fourth one."""
    shown = " ".join(f"{name}={environ.get(name, '')}" for name in names)
    if missing := [name for name in names if not environ.get(name)]:
        raise UserError(
            f"half a launcher environment: {shown}", f"{', '.join(missing)} not set: start with mpirun or srun."
        )
    if not all(environ[name].isascii() and environ[name].isdigit() for name in names):
        raise UserError(f"not all numbers: {shown}", "Start with mpirun or srun, which set them.")
    rank, size, local_rank, fourth = values = [int(environ[name]) for name in names]
    if not rank < size or (local_size and not local_rank < fourth <= size):
        raise UserError(f"a contradictory launcher environment: {shown}", "Start with mpirun or srun, which set them.")
    return values


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` as [2, 2, 2, 1]; empty where it is something else."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first of Slurm's `rack[03-05,9]-a,other` as rack03-a."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", nodes)
    name = "".join(part or "" for part in found.groups()) if found else ""
    if not name:
        raise UserError(f"SLURM_STEP_NODELIST={nodes} names no host", "Set MASTER_ADDR to rank 0's host.")
    return name
