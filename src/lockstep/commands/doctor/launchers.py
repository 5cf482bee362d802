"""What launchers left in the environment: torchrun's, mpirun's and Slurm's variables, whole, torn or leftover."""

import os
from collections.abc import Iterator, Mapping

from lockstep.commands.doctor.finding import Finding, fail, ok, skipped, warn
from lockstep.errors import UserError

_RANKED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def launcher(environ: Mapping[str, str] = os.environ) -> Finding:
    """Would `lockstep train`, started from here, take itself for a rank of somebody's run?"""
    from lockstep.processes.world import joined

    check, present = "launcher", [name for name in (*_RANKED, "MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
    adopted = dict(environ)
    try:
        ranked = joined(adopted)
    except UserError as error:
        return fail(check, error.message, error.remedy or "Unset the variables.")
    if ranked:
        who = f"RANK={adopted['RANK']} of WORLD_SIZE={adopted['WORLD_SIZE']}"
        own = "mpirun or srun" if not environ.get("RANK") else "torchrun"
        message = f"{who} ({own}'s variables): a run from here would wait for {int(adopted['WORLD_SIZE']) - 1} others"
        remedy = "Start doctor once on each host, without a launcher" + (
            f"; if none started this, unset {' '.join(present)}." if environ.get("RANK") else "."
        )
        return warn(check, message, remedy)
    if present:
        shown = " ".join(f"{name}={environ[name]}" for name in present)
        return ok(check, f"no ranks; {shown} would be heeded under mpirun and srun")
    return ok(check, "no launcher's variables: a run from here starts its own processes")


def slurm(environ: Mapping[str, str], gpus: int, usable: int) -> Iterator[Finding]:
    """The task geometry of a Slurm job.

    Args:
        environ: Slurm's variables.
        gpus: devices that this process sees.
        usable: cores that it may run on.
    """
    from lockstep.processes.environment import tasks_per_node

    if not environ.get("SLURM_JOB_ID"):
        yield skipped("Slurm", "not inside a Slurm job")
        return
    step = bool(environ.get("SLURM_STEP_ID")) and bool(environ.get("SLURM_PROCID"))
    batch = not step or environ.get("SLURM_STEP_NODELIST") is None
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE" if not batch else "SLURM_TASKS_PER_NODE", ""))
    nodes = _number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES") or len(per_node) or 1
    tasks = sum(per_node) or _number(environ, "SLURM_NTASKS") or 1
    found = list(_geometry(nodes, tasks, per_node, batch, gpus or _number(environ, "SLURM_GPUS_ON_NODE")))
    yield from found
    local = per_node[0] if per_node else 1
    on_node = tasks_per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if on_node and usable * (1 if batch else local) < on_node[0]:
        message = f"{usable} core(s) for each of {local} task(s), and the job has {on_node[0]} on this node"
        remedy = f"Give srun --cpus-per-task={on_node[0] // local}: it does not take sbatch's."
        yield warn("Slurm cores", message, remedy)
    if not found:
        what = "one task on each node, which starts its processes" if tasks == nodes else f"{local} task(s) on a node"
        yield ok("Slurm", f"{nodes} node(s), {tasks} task(s): {what}", nodes=nodes, tasks=tasks, gpus=gpus)


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0


def _geometry(nodes: int, tasks: int, per_node: list[int], batch: bool, gpus: int) -> Iterator[Finding]:
    local = max(per_node, default=1)
    if batch and tasks > 1:
        message = f"a batch script's own shell: this runs once, on the first node, not as {tasks} tasks"
        yield warn("Slurm", message, "Put srun before the command: `srun lockstep train ...`.")
    if (idle := nodes - (len(per_node) or min(tasks, nodes))) > 0:
        message = f"{tasks} task(s) on {nodes} nodes: {idle} node(s) stay idle"
        remedy = "Use --ntasks-per-node=1 (each task starts its node's processes) in place of --ntasks=1."
        yield fail("Slurm", message, remedy)
    elif gpus and local > gpus:
        message = f"{local} tasks on a node, and {gpus} GPU(s) in sight: NCCL takes one process per GPU"
        remedy = (
            f"Use --ntasks-per-node={gpus}, and --gpus-per-node, not --gpus-per-task: each task must see all of them."
        )
        yield fail("Slurm", message, remedy)
    elif gpus and 1 < local < gpus:
        message = f"{local} tasks on a node with {gpus} GPUs: {gpus - local} stay idle"
        yield warn("Slurm", message, f"Use --ntasks-per-node={gpus}, or 1 (a task starts its node's processes).")
    elif len(set(per_node)) > 1:
        message = f"{per_node} tasks on the nodes: the slowest node rules"
        yield warn("Slurm", message, "Use --ntasks-per-node in place of --ntasks.")
