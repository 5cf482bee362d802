"""Which rank a process has, by the variables of torchrun, mpirun, srun or another MPI's starter.

Those of the others are translated to torchrun's, which all else reads.
"""

import hashlib
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace

from lockstep.config import Execution
from lockstep.errors import UserError

JOB = "LOCKSTEP_JOB"  # name of a run whose rank 0 has to open the store: mpirun and srun, unlike torchrun, have none
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
_FIRST_PORT, _LAST_PORT = 15_000, 32_000  # below those that systems hand out for outgoing connections


def port_of(job: str) -> int:
    """The port where a job's ranks meet if MASTER_PORT names none."""
    return _FIRST_PORT + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % (_LAST_PORT - _FIRST_PORT)


def restore_variables(variables: Mapping[str, str | None]) -> None:
    """Give variables of the environment the values that they had; None: there was none."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}


def launcher_ranks(environ: MutableMapping[str, str] = os.environ) -> list[int] | None:
    """Rank, size, local rank and local size, where a launcher (torchrun, ours, mpirun, srun) started this process.

    What mpirun or srun set is in torchrun's variables afterwards; MASTER_ADDR and MASTER_PORT are kept. UserError names
    the variables of a torn or contradictory environment.
    """
    if not _has_ranks(environ):
        found = _translated(environ)
        environ.update({name: environ.get(name) or value for name, value in found.items()})
        if not found:
            return None
    return _numbers(environ, (*_TORCHRUN, "MASTER_PORT", "MASTER_ADDR"), "`lockstep train --nproc N` or torchrun")[:4]


def _has_ranks(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in _TORCHRUN)  # MASTER_ADDR alone is often exported for other programs


def _translated(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables and JOB, by those of an MPI or Slurm; empty where this process is alone, or on its node.

    Open MPI comes first: its ranks may be started through srun, whose variables then count its helpers. A PMI whose
    rank is not Slurm's is another MPI's, started through srun likewise.
    """
    if environ.get(_OPEN_MPI[0]):
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
        return _mpi(environ, _OPEN_MPI, f"mpi-{job}", "mpirun -x MASTER_ADDR=HOST-OF-RANK-0")
    if environ.get("SLURM_STEP_ID") and not _is_other_pmi(environ):
        return _slurm(environ)
    return _mpi(environ, _PMI, f"pmi-{os.getppid()}", "mpiexec -genv MASTER_ADDR HOST") if environ.get(_PMI[0]) else {}


def _variables(ranks: Sequence[int], host: str, job: str) -> dict[str, str]:
    """As torchrun would set them; `job` is a name that no other run on these hosts has at the same time."""
    if ranks[1] == 1:
        return {}
    named = dict(zip(_TORCHRUN, map(str, ranks), strict=True))
    return named | {"MASTER_ADDR": host, "MASTER_PORT": str(port_of(job)), JOB: job}


def _mpi(environ: Mapping[str, str], names: Sequence[str], job: str, remedy: str) -> dict[str, str]:
    ranks = _numbers(environ, names, "mpirun")
    if ranks[3] < ranks[1] and not environ.get("MASTER_ADDR"):
        raise UserError(
            f"ranks on several hosts ({names[3]}={ranks[3]} of {names[1]}={ranks[1]}), and MASTER_ADDR is not set",
            f"Set it to rank 0's host: {remedy}.",
        )
    return _variables(ranks, "127.0.0.1", job)


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    ranks = _numbers(environ, _SLURM, "srun", per_node)
    if set(per_node) == {1}:
        return {}  # see `over_slurm_nodes`
    several = len(per_node) > 1 and not environ.get("MASTER_ADDR")  # on one node its name need not resolve
    host = first_host(environ.get("SLURM_STEP_NODELIST", "")) if several else "127.0.0.1"
    return _variables(ranks, host, _slurm_job(environ))


def over_slurm_nodes(execution: Execution, environ: Mapping[str, str] = os.environ) -> Execution:
    """The execution on all nodes of a Slurm step that has one task on each: the task starts its node's processes."""
    nodes = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    in_step = environ.get("SLURM_STEP_ID") and not _is_other_pmi(environ) and not _has_ranks(environ)
    if execution.nnodes > 1 or not in_step or len(nodes) < 2 or set(nodes) != {1}:
        return execution
    filled = {**environ, "MASTER_PORT": environ.get("MASTER_PORT") or str(port_of(_slurm_job(environ)))}
    # one task a node: ranks are in its order
    node, *_, port = _numbers(filled, (*_SLURM, "MASTER_PORT"), "srun", nodes)
    host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", ""))
    return replace(execution, nnodes=len(nodes), node_rank=node, master_addr=host, master_port=port)


def _slurm_job(environ: Mapping[str, str]) -> str:
    return "slurm-" + ".".join(environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))


def _is_other_pmi(environ: Mapping[str, str]) -> bool:
    """True where a PMI counts this process otherwise than Slurm does."""
    return bool(environ.get(_PMI[0])) and any(environ.get(_PMI[i]) != environ.get(_SLURM[i]) for i in (0, 1))


def _numbers(environ: Mapping[str, str], names: Sequence[str], starter: str, per_node: Sequence[int] = ()) -> list[int]:
    """The values of these variables, all of which must be set: rank, size, local rank, local size, and more.

    `per_node`: each node's local size, where the fourth variable has this node's number.
    """
    present, remedy = ", ".join(name for name in names if environ.get(name)), f"Start with {starter}"
    if missing := [name for name in names if not environ.get(name)]:
        message = f"half a launcher environment: {present} set, {', '.join(missing)} not set"
        raise UserError(message, f"{remedy}, which sets all of them, or unset {present}.")
    numbers = [name for name in names if name != "MASTER_ADDR"]
    if bad := [f"{name}={environ[name]}" for name in numbers if not re.fullmatch("[0-9]{1,9}", environ[name])]:
        raise UserError(f"not a number: {', '.join(bad)}", f"{remedy}, which sets it.")
    rank, size, local_rank, local_size, *more = (int(environ[name]) for name in numbers)
    if per_node:
        local_size = per_node[local_size] if local_size < len(per_node) and sum(per_node) == size else 0
    if not (local_rank <= rank < size and local_rank < local_size <= size):
        raise UserError(
            f"a contradictory launcher environment: {' '.join(f'{name}={environ[name]}' for name in names[:4])}",
            f"Ranks run from 0 to the size less 1, on each host from 0 to its number of processes less 1. {remedy}.",
        )
    return [rank, size, local_rank, local_size, *more]


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` as [2, 2, 2, 1]; empty where it is something else."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        return []
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """The first of Slurm's `rack[03-05,9]-a,other` as rack03-a."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", nodes)
    name = "".join(part or "" for part in found.groups()) if found else ""
    if not name:
        raise UserError(f"SLURM_STEP_NODELIST={nodes} names no host", "Set MASTER_ADDR to rank 0's host.")
    return name
