"""A job file for Slurm's sbatch: stopped before its limit, it checkpoints, queues again and goes on."""

import re
import shlex
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from lockstep.config import Interval, Names
from lockstep.config.fields import require
from lockstep.tools.launch_script.plan import Allotted

_STOPPED = 138  # `lockstep train` after SIGUSR1
_NAME = r"[\w.,:=@%+/\[\]()*&|-]*"  # what #SBATCH takes without quotes


@dataclass(frozen=True)
class SlurmPlan(Allotted):
    """A run as a Slurm job, one task for each process."""

    time: Annotated[str, arg(help_behavior_hint="(default: the partition's)")] = ""
    """Limit of the job, as 30 (minutes), 24:00:00 or 2-00:00:00."""
    signal_before: int = 120
    """Seconds before the limit at which the run takes a checkpoint and stops; Slurm may be a minute early."""
    requeues: int = 100
    """Times that the job may go back to the queue to go on (0: never)."""
    partition: str = ""
    """Partition to queue in."""
    account: str = ""
    """Account to charge."""
    sbatch: Annotated[Names, arg(help_behavior_hint="(default: none)")] = ()
    """Further options of sbatch without their hyphens, as constraint=a100,exclusive."""
    setup: str = ""
    """Shell command to run first, as "source ~/venv/bin/activate"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, value in (("signal-before", self.signal_before), ("requeues", self.requeues)):
            require(value >= 0, f"--{flag} {value} is negative", "Use 0 or more.")
        for flag, text in (
            ("partition", self.partition),
            ("account", self.account),
            *(("sbatch", x) for x in self.sbatch),
        ):
            require(
                bool(re.fullmatch(_NAME, text)), f"--{flag} {text}: not one word", "Name it as sbatch would take it."
            )
        limit = seconds(self.time)
        require(limit >= 0, f"--time {self.time}: not a limit", "Give it as 30 (minutes), 24:00:00 or 2-00:00:00.")
        require(
            not self.time or limit > self.signal_before,
            f"--signal-before {self.signal_before} is no less than --time {self.time}",
            "A run that is stopped at its start never gets on: give a longer limit.",
        )
        require(
            not self.requeues or Interval.parse(self.config.recovery.checkpoint_every).count > 0,
            "--checkpoint-every 0, and a job that comes back would begin anew",
            "Leave it out, or add --requeues 0.",
        )


def seconds(limit: str) -> int:
    """A limit in Slurm's notations (minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s); 0 for none, -1 for something else."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        return -1 if limit else 0
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None or len(parts) == 3:
        hours, minutes, secs = [*parts, 0, 0][:3]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def script(plan: SlurmPlan) -> str:
    """The job file."""
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in _options(plan)), ""]
    if plan.setup:
        lines += [plan.setup, ""]
    lines += [_command(plan), "code=$?"]
    if plan.requeues:
        lines += [
            f'if [ "$code" -eq {_STOPPED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {plan.requeues} ]; then',
            "    # stopped before the limit, after a checkpoint: the same job again goes on from there",
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$code"', ""])


def _options(plan: SlurmPlan) -> list[str]:
    """What follows #SBATCH."""
    wanted = {
        "job-name": plan.job,
        "nodes": plan.nnodes,
        "ntasks-per-node": plan.per_node,
        "cpus-per-task": plan.cores,
        "gpus-per-node": plan.gpus_per_node,
        "mem": plan.memory.removesuffix("i"),  # Slurm's G is 1024^3 as it is
        "time": plan.time,
        "partition": plan.partition,
        "account": plan.account,
        "signal": f"USR1@{plan.signal_before}" if plan.signal_before else "",
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    requeue = "requeue" if plan.requeues else "no-requeue"
    return [*(f"{name}={value}" for name, value in wanted.items() if value), requeue, *plan.sbatch]


def _command(plan: SlurmPlan) -> str:
    """srun's line. The run folder has the job's number, which stays when the job comes back."""
    execution = plan.config.execution
    # one process learns from Slurm that it is alone on its machine, and would start others
    flags = plan.train_flags(nproc=1 if plan.per_node == 1 else "auto")
    lines = [f"srun --cpus-per-task={plan.cores} lockstep train {shlex.quote(plan.config.recipe)}"]
    lines += [f"    {shlex.join(words)}" for words in flags]
    if not execution.out:
        lines.append(f'    --out runs/{plan.job}-"$SLURM_JOB_ID"')
    return " \\\n".join(lines)
