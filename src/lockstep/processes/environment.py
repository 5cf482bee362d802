"""Which rank a process has, by the variables of torchrun, mpirun, srun or another MPI's starter.

Those of the others are translated to torchrun's, which all else reads. How the ranks find each other is `rendezvous`'s.
"""

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace

from lockstep.config import Execution
from lockstep.errors import UserError
from lockstep.processes.rendezvous import ports

JOB = "LOCKSTEP_JOB"  # of a run whose ranks find their port themselves; torchrun's runs have a port in MASTER_PORT
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def launcher_ranks(environ: MutableMapping[str, str] = os.environ) -> list[int] | None:
    """Rank, size, local rank and local size, where a launcher (torchrun, ours, mpirun, srun) started this process.

    What mpirun or srun set is in torchrun's variables afterwards.

    Raises:
        UserError: for a torn or contradictory environment, naming the variables.
    """
    set_torchrun_variables(environ)
    if not any(environ.get(name) for name in _TORCHRUN):  # MASTER_ADDR alone is often exported for other programs
        return None
    starter = "`lockstep train --nproc N` or torchrun"
    return _numbers(environ, [*_TORCHRUN, "MASTER_PORT"], starter, texts=["MASTER_ADDR"])[:4]


def set_torchrun_variables(environ: MutableMapping[str, str]) -> None:
    """Where mpirun or srun started this process, add torchrun's variables; MASTER_ADDR and MASTER_PORT are kept."""
    if any(environ.get(name) for name in _TORCHRUN):
        return
    given = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    if found := translated(environ):
        environ.update(found | given)
        if "MASTER_PORT" in given:
            del environ[JOB]


def translated(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables and JOB, by those of an MPI or Slurm; empty where this process is alone, or on its node.

    Open MPI comes first: its ranks may be started through srun, whose variables then count its helpers. A PMI whose
    rank is not Slurm's is another MPI's, started through srun likewise.
    """
    if environ.get("OMPI_COMM_WORLD_RANK"):
        return _open_mpi(environ)
    if environ.get("SLURM_STEP_ID") and not _is_other_pmi(environ):
        return _slurm(environ)
    return _pmi(environ) if environ.get("PMI_RANK") else {}


def _variables(rank: int, size: int, local_rank: int, local_size: int, host: str, job: str) -> dict[str, str]:
    """As torchrun would have set them; `job` is a name that no other run on these hosts has at the same time."""
    if size == 1:
        return {}
    ranks = dict(zip(_TORCHRUN, map(str, (rank, size, local_rank, local_size)), strict=True))
    return ranks | {"MASTER_ADDR": host, "MASTER_PORT": str(ports(job)[0]), JOB: job}


def over_slurm_nodes(execution: Execution, environ: Mapping[str, str] = os.environ) -> Execution:
    """The execution on all nodes of a Slurm step that has one task on each: the task starts its node's processes."""
    if execution.nnodes > 1 or _is_other_pmi(environ) or not environ.get("SLURM_STEP_ID"):
        return execution
    nodes = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(nodes) < 2 or set(nodes) != {1}:
        return execution
    node = _number(environ, "SLURM_NODEID", "Start with srun, which sets it.")
    if node >= len(nodes):
        raise UserError(f"SLURM_NODEID={node} of {len(nodes)} nodes", "Start with srun, which sets it.")
    port = _number(environ, "MASTER_PORT", "Unset it.") if environ.get("MASTER_PORT") else ports(_slurm_job(environ))[0]
    return replace(
        execution,
        nnodes=len(nodes),
        node_rank=node,
        master_addr=environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "")),
        master_port=port,
    )


def _number(environ: Mapping[str, str], name: str, remedy: str) -> int:
    value = environ.get(name, "")
    if not re.fullmatch("[0-9]{1,9}", value):
        raise UserError(f"{name}={value} is no number" if value else f"{name} is not set", remedy)
    return int(value)


def _is_other_pmi(environ: Mapping[str, str]) -> bool:
    """True where a PMI counts this process otherwise than Slurm does."""
    slurm = environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS")
    return bool(environ.get("PMI_RANK")) and (environ.get("PMI_RANK"), environ.get("PMI_SIZE")) != slurm


def _open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    return _mpi(environ, names, f"mpi-{job}", "mpirun -x MASTER_ADDR=HOST-OF-RANK-0")


def _pmi(environ: Mapping[str, str]) -> dict[str, str]:
    names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    return _mpi(environ, names, f"pmi-{os.getppid()}", "mpiexec -genv MASTER_ADDR HOST-OF-RANK-0")


def _mpi(environ: Mapping[str, str], names: list[str], job: str, remedy: str) -> dict[str, str]:
    rank, size, local_rank, local_size = _numbers(environ, names, "mpirun")
    if local_size < size and not environ.get("MASTER_ADDR"):
        raise UserError(
            f"ranks on several hosts ({names[3]}={local_size} of {names[1]}={size}), and MASTER_ADDR is not set",
            f"Set it to rank 0's host: {remedy}.",
        )
    return _variables(rank, size, local_rank, local_size, environ.get("MASTER_ADDR") or "127.0.0.1", job)


def _slurm_job(environ: Mapping[str, str]) -> str:
    return "slurm-" + ".".join(environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"]
    rank, size, local_rank, node = _numbers(environ, names, "srun", local_size=False)
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(per_node) != size or not 0 <= node < len(per_node) or not 0 <= local_rank < per_node[node]:
        shown = " ".join(f"{name}={environ.get(name)}" for name in (*names, "SLURM_STEP_TASKS_PER_NODE"))
        raise UserError(f"a contradictory Slurm environment: {shown}", "Start with srun, which sets all of them.")
    if set(per_node) == {1}:
        return {}  # see `over_slurm_nodes`
    # on one node its name is not asked for: it need not resolve
    host = first_host(environ.get("SLURM_STEP_NODELIST", "")) if len(per_node) > 1 else "127.0.0.1"
    return _variables(rank, size, local_rank, per_node[node], environ.get("MASTER_ADDR") or host, _slurm_job(environ))


def _numbers(
    environ: Mapping[str, str], names: list[str], starter: str, texts: Sequence[str] = (), local_size: bool = True
) -> list[int]:
    """The values of rank, size, local rank, local size (or another fourth number) and more; `texts` must be set too."""
    remedy = f"Start with {starter}, which sets all of them"
    present = ", ".join(name for name in (*names, *texts) if environ.get(name))
    if missing := [name for name in (*names, *texts) if not environ.get(name)]:
        message = f"half a launcher environment: {present} set, {', '.join(missing)} not set"
        raise UserError(message, f"{remedy}, or unset {present}.")
    if bad := [f"{name}={environ[name]}" for name in names if not re.fullmatch("[0-9]+", environ[name])]:
        raise UserError(f"not a number: {', '.join(bad)}", f"{remedy}.")
    rank, size, local_rank, fourth, *_ = values = [int(environ[name]) for name in names]
    if not (local_rank <= rank < size and (not local_size or local_rank < fourth <= size)):
        shown = " ".join(f"{name}={environ[name]}" for name in names[:4])
        raise UserError(
            f"a contradictory launcher environment: {shown}",
            f"Ranks run from 0 to the size less 1, on each host from 0 to its number of processes less 1. {remedy}.",
        )
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
