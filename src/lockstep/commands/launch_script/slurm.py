"""A job file for Slurm's sbatch: stopped before its limit, it checkpoints, queues again and goes on."""

import re
import shlex
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from lockstep.commands.launch_script.plan import Allotted
from lockstep.config import Names
from lockstep.config.fields import require, require_at_least

_NAME = r"[\w.,:=@%+/\[\]()*&|-]*"  # what #SBATCH takes without quotes


@dataclass(frozen=True)
class SlurmPlan(Allotted):
    """A run as a Slurm job, one task for each process."""

    time: Annotated[str, arg(help_behavior_hint="(default: the partition's)")] = ""
    """Limit of the job, as 30 (minutes), 24:00:00 or 2-00:00:00."""
    signal_before: int = 120
    """Seconds before the limit at which the run is told to take a checkpoint and stop; Slurm may be a minute early."""
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
        require_at_least(0, self, "requeues")
        before = f"--signal-before {self.signal_before}"
        require(self.signal_before > 0, f"{before}: no time for a checkpoint", "Use 1 or more.")
        given = {"partition": [self.partition], "account": [self.account], "sbatch": self.sbatch}
        for flag, text in ((flag, text) for flag, texts in given.items() for text in texts):
            require(re.fullmatch(_NAME, text), f"--{flag} {text}: not one word", "Name it as sbatch would take it.")
        limit = seconds(self.time)
        require(limit >= 0, f"--time {self.time}: not a limit", "Give it as 30 (minutes), 24:00:00 or 2-00:00:00.")
        remedy = "A run that is stopped at its start never gets on: give a longer limit."
        require(not self.time or limit > self.signal_before, f"{before} is no less than --time {self.time}", remedy)
        message = "--checkpoint-every 0, and a job that comes back would begin anew"
        kept = not self.requeues or self.config.recovery.checkpoint_interval.count > 0
        require(kept, message, "Leave it out, or add --requeues 0.")


def seconds(limit: str) -> int:
    """A limit in Slurm's notations (minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s); 0 for none, -1 for something else."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        return -1 if limit else 0
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def script(plan: SlurmPlan) -> str:
    """The job file."""
    head = "".join(f"#SBATCH --{option}\n" for option in _options(plan))
    setup = f"{plan.setup}\n\n" if plan.setup else ""
    return f"#!/bin/bash\n{head}\n" + _BODY.format(
        setup=setup,
        run=_command(plan),
        requeues=plan.requeues,
        patience=plan.signal_before * 3 // 4,
        restarts=plan.config.recovery.max_restarts,
    )


# bash waits for a run in the background alone: for one in the foreground it would put the signal off
_BODY = """\
again() {{
    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ] && scontrol requeue "$SLURM_JOB_ID"
}}
preempted() {{
    scontrol show job "$SLURM_JOB_ID" | grep -q " PreemptTime=[0-9]"
}}
near_limit() {{
    near=yes
    # the run's processes take a checkpoint and end; where they do not, they are ended, and go on from the one before
    scancel --signal=USR1 "$SLURM_JOB_ID"
    sleep {patience} && again &
}}
near=
trap near_limit USR1

{setup}for _ in {{0..{restarts}}}; do
    {run} &
    run=$!
    wait "$run"
    wait "$run" # the first one ends where the signal comes
    code=$?
    # after a hang, or a process that crashed or was killed, once more from the newest checkpoint; not near the limit
    case $code$near in 124 | 134 | 135 | 136 | 137 | 139) ;; *) break ;; esac
done
# stopped after a checkpoint, by SIGUSR1 or to make room for another job: the same job again goes on from there
if [ "$code" -eq 138 ] || {{ [ "$code" -eq 143 ] && preempted; }}; then
    again
fi
exit "$code"
"""


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
        "signal": f"B:USR1@{plan.signal_before}",  # B: to this script, not to the run
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
    lines += [f"        {shlex.join(flag)}" for flag in flags]
    if not execution.out:
        lines.append(f'        --out runs/{plan.job}-"$SLURM_JOB_ID"')
    return " \\\n".join(lines)
