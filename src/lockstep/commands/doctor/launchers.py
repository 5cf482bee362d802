"""What launchers left in the environment: torchrun's, mpirun's and Slurm's variables, whole, torn or leftover."""

import os
from collections.abc import Iterator, Mapping

from lockstep.commands.doctor.finding import Finding
from lockstep.errors import UserError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launcher(environ: Mapping[str, str] = os.environ) -> Finding:
    """Would `lockstep train`, started from here, take itself for a rank of somebody's run?"""
    from lockstep.processes.environment import launcher_ranks

    check, present = "launcher", [name for name in _VARIABLES if environ.get(name)]
    adopted = dict(environ)
    try:
        ranked = launcher_ranks(adopted)
    except UserError as error:
        return Finding(check, "fail", error.message, error.remedy or "Unset the variables.")
    if ranked:
        own, leftover = "mpirun or srun", "."
        if environ.get("RANK"):
            own, leftover = "torchrun", f"; if none started this, unset {' '.join(present)}."
        who = f"RANK={adopted['RANK']} of WORLD_SIZE={adopted['WORLD_SIZE']}"
        message = f"{who} ({own}'s variables): a run from here would wait for {int(adopted['WORLD_SIZE']) - 1} others"
        return Finding(check, "warn", message, f"Start doctor once on each host, without a launcher{leftover}")
    if present:
        shown = " ".join(f"{name}={environ[name]}" for name in present)
        return Finding(check, "ok", f"no ranks; {shown} would be heeded under mpirun and srun")
    return Finding(check, "ok", "no launcher's variables: a run from here starts its own processes")


def slurm(environ: Mapping[str, str], gpus: int, usable: int) -> Iterator[Finding]:
    """The task geometry of a Slurm job. `gpus`: that this process sees; `usable`: cores that it may run on."""
    from lockstep.processes.environment import tasks_per_node

    check = "Slurm"
    if not environ.get("SLURM_JOB_ID"):
        yield Finding(check, "skipped", "not inside a Slurm job")
        return
    in_step = all(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST"))
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE" if in_step else "SLURM_TASKS_PER_NODE", ""))
    nodes = _number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES") or len(per_node) or 1
    tasks = sum(per_node) or _number(environ, "SLURM_NTASKS") or 1
    # a task that sees a single one may have been given it by --gpus-per-task
    seen, most = gpus if gpus > 1 else _number(environ, "SLURM_GPUS_ON_NODE") or gpus, max(per_node, default=1)
    idle = nodes - (len(per_node) or min(tasks, nodes))
    alone = tasks > 1 and not in_step
    on_node, local = tasks_per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", "")), per_node[0] if per_node else 1
    if on_node and usable * (local if in_step else 1) < on_node[0]:
        message = f"{usable} core(s) for each of {local} task(s), and the job has {on_node[0]} on this node"
        remedy = f"Give srun --cpus-per-task={on_node[0] // local}: it does not take sbatch's."
        yield Finding("Slurm cores", "warn", message, remedy)
    if alone:
        message = f"a batch script's own shell: this runs once, on the first node, not as {tasks} tasks"
        yield Finding(check, "warn", message, "Put srun before the command: `srun lockstep train ...`.")
    if idle > 0:
        message = f"{tasks} task(s) on {nodes} nodes: {idle} node(s) stay idle"
        remedy = "Use --ntasks-per-node=1 (each task starts its node's processes) in place of --ntasks=1."
        yield Finding(check, "fail", message, remedy)
    elif 0 < seen < most:
        message = f"{most} tasks on a node, and {seen} GPU(s) in sight: NCCL takes one process per GPU"
        every = "--gpus-per-node: each task must see all of them, or one of its own by --gpus-per-task=1"
        yield Finding(check, "fail", message, f"Use --ntasks-per-node={seen}, and {every}.")
    elif 1 < most < seen:
        message = f"{most} tasks on a node with {seen} GPUs: {seen - most} stay idle"
        remedy = f"Use --ntasks-per-node={seen}, or 1 (a task starts its node's processes)."
        yield Finding(check, "warn", message, remedy)
    elif len(set(per_node)) > 1:
        message = f"{per_node} tasks on the nodes: the slowest node rules"
        yield Finding(check, "warn", message, "Use --ntasks-per-node in place of --ntasks.")
    elif not alone:
        what = "one task on each node, which starts its processes" if tasks == nodes else f"{most} task(s) on a node"
        numbers = {"nodes": nodes, "tasks": tasks, "gpus": gpus}
        yield Finding(check, "ok", f"{nodes} node(s), {tasks} task(s): {what}", "", numbers)


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0
