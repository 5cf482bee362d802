"""`lockstep launch-script`: the file or the lines with which a scheduler, or torchrun on each machine, starts a run."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from lockstep.commands.shared.arguments import HelpAsked, NoFlags, planned
from lockstep.config import Config, Names
from lockstep.config.changes import flags_for
from lockstep.config.fields import Arg, Count, check_fields, require
from lockstep.config.recipes import recipe
from lockstep.distributed.environment import port_of
from lockstep.errors import UserError, unknown

# which machines the run is on, the job file says, or torchrun
_MACHINES: dict[str, Any] = {"nnodes": 1, "node_rank": 0, "master_addr": "", "master_port": 0}
_MOUNT = "/lockstep"


@dataclass(frozen=True)
class Plan:
    """A run on several machines, whatever starts it there."""

    name: Annotated[str, Arg(unset="the recipe's")] = ""
    """Name of the job."""
    file: Annotated[str, Arg(unset="standard output")] = ""
    """Write to this file."""
    nnodes: int = 1
    """Machines in the run; --nproc is the number of processes on each."""
    config: Config = field(default_factory=Config, metadata={"hidden": tuple(_MACHINES)})

    def __post_init__(self) -> None:
        require(self.nnodes >= 1, f"--nnodes {self.nnodes} is no machine", "Use 1 or more.")
        sound, rule = re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", self.job), "small letters, digits and hyphens"
        message = f"--name {self.job}: not a name that every scheduler takes"
        require(sound, message, f"Use {rule}, a letter first, at most 52 of them.")
        self.config.require_batch_for(self.per_node * self.nnodes)

    @classmethod
    def of(cls, config: Config, **chosen: Any) -> Self:
        """The plan for a recipe's config."""
        return cls(config=config.with_execution(**_MACHINES), nnodes=config.execution.nnodes, **chosen)

    @property
    def job(self) -> str:
        """The job's name."""
        from_recipe = re.sub(r"[^a-z0-9]+", "-", self.config.recipe.lower()).lstrip("-0123456789")
        return self.name or from_recipe[:52].rstrip("-")

    @property
    def per_node(self) -> int:
        """Processes on each machine, as far as that is known here: 1 for auto."""
        nproc = self.config.execution.nproc
        return 1 if nproc == "auto" else nproc

    def train_flags(self, **changed: Any) -> list[list[str]]:
        """The flags that the recipe does not have so already, each with its value; `changed`: fields of Execution."""
        return flags_for(self.config.with_execution(**changed), recipe(self.config.recipe), _MACHINES)

    def torchrun_arguments(self, out: str, **changed: str) -> list[str]:
        """What torchrun starts; `out`: the run folder where --out names none, so that a restart goes on with it."""
        flags = self.train_flags(nproc="auto", out=self.config.execution.out or out, **changed)
        own = [argument for flag in flags if flag[0] != "--max-restarts" for argument in flag]
        return ["-m", "lockstep", "train", self.config.recipe, *own]


@dataclass(frozen=True)
class Allotted(Plan):
    """A run for which a scheduler allots machines, and GPUs and cores on them."""

    gpus_per_node: Count = 0
    """GPUs on each machine."""
    cpus_per_task: Count = 0
    """Cores for each process (0: --threads, or with GPUs 1 + --workers, or 1)."""
    memory: Annotated[str, Arg(unset="the cluster's")] = ""
    """Memory of each machine, as 64G or 64Gi."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        execution, gpus = self.config.execution, self.gpus_per_node
        message = "--gpus, and the scheduler chooses which GPUs a job gets"
        require(not execution.gpus, message, "Say how many: --gpus-per-node.")
        enough = not gpus or self.per_node <= gpus
        message = f"--gpus-per-node {gpus} for {self.per_node} processes"
        require(enough, message, "NCCL takes one process per GPU: raise it, or lower --nproc.")
        amount = re.fullmatch(r"(\d+([KMGT]i?)?)?", self.memory)
        require(amount, f"--memory {self.memory}: not an amount", "Give it as 64G or 64Gi.")

    @property
    def per_node(self) -> int:
        """Processes on each machine: --nproc, or one for each GPU, or one."""
        return max(1, self.gpus_per_node) if self.config.execution.nproc == "auto" else super().per_node

    @property
    def cores(self) -> int:
        """Cores for each process."""
        execution = self.config.execution
        return self.cpus_per_task or execution.threads or (1 + execution.workers if self.gpus_per_node else 1)


@dataclass(frozen=True)
class SlurmPlan(Allotted):
    """A run as a Slurm job, one task for each process."""

    time: Annotated[str, Arg(unset="the partition's")] = ""
    """Limit of the job, as 30 (minutes), 24:00:00 or 2-00:00:00."""
    signal_before: int = 120
    """Seconds before the limit at which the run takes a checkpoint and stops; Slurm may be a minute early."""
    requeues: Count = 100
    """Times that the job may go back to the queue to go on (0: never)."""
    sbatch: Annotated[Names, Arg(unset="none")] = ()
    """Further options of sbatch without their hyphens, as partition=gpu,account=me."""
    setup: str = ""
    """Shell command to run first, as "source ~/venv/bin/activate"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        before = f"--signal-before {self.signal_before}"
        require(self.signal_before > 0, f"{before}: no time for a checkpoint", "Use 1 or more.")
        for text in (self.time, *self.sbatch):
            word = re.fullmatch(r"[\w.,:=@%+/\[\]()*&|-]*", text)  # what #SBATCH takes without quotes
            require(word, f"{text!r} is not one word", "Name it as sbatch would take it.")
        kept = not self.requeues or self.config.recovery.checkpoint_interval.count > 0
        message = "--checkpoint-every 0, and a job that comes back would begin again"
        require(kept, message, "Leave it out, or add --requeues 0.")


# bash waits for a run in the background alone: for one in the foreground it would put the signal off
_SLURM = """\
#!/bin/bash
{% for option in options %}
#SBATCH --{{ option }}
{% endfor %}

again() {
    [ "${SLURM_RESTART_COUNT:-0}" -lt {{ plan.requeues }} ] && scontrol requeue "$SLURM_JOB_ID"
}
preempted() {
    scontrol show job "$SLURM_JOB_ID" | grep -q " PreemptTime=[0-9]"
}
near_limit() {
    near=yes
    # the run's processes take a checkpoint and end; where they do not, they are ended, and go on from the one before
    scancel --signal=USR1 "$SLURM_JOB_ID"
    # not as a job of this shell: where both end at one time, bash may take its exit code for the run's
    (sleep {{ plan.signal_before * 3 // 4 }} && again &)
}
near=
trap near_limit USR1

{% if plan.setup %}
{{ plan.setup }}

{% endif %}
for _ in {0..{{ plan.config.recovery.max_restarts }}}; do
    srun --cpus-per-task={{ plan.cores }} lockstep train {{ command | join(" \\\\\n        ") }} &
    run=$!
    wait "$run"
    wait "$run" # the first one ends where the signal comes
    code=$?
    # after a hang, or a process that crashed or was killed, once more from the newest checkpoint; not near the limit
    case $code$near in 124 | 134 | 135 | 136 | 137 | 139) ;; *) break ;; esac
done
# stopped after a checkpoint, by SIGUSR1 or to make room for another job: the same job again goes on from there
if [ "$code" -eq 138 ] || { [ "$code" -eq 143 ] && preempted; }; then
    again
fi
exit "$code"
"""


def slurm(plan: SlurmPlan) -> str:
    """The job file: stopped before its limit, it checkpoints, queues again and goes on."""
    from jinja2 import Template

    wanted = {
        "job-name": plan.job,
        "nodes": plan.nnodes,
        "ntasks-per-node": plan.per_node,
        "cpus-per-task": plan.cores,
        "gpus-per-node": plan.gpus_per_node,
        "mem": plan.memory.removesuffix("i"),  # Slurm's G is 1024^3 as it is
        "time": plan.time,
        "signal": f"B:USR1@{plan.signal_before}",  # B: to this script, not to the run
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    requeue = "requeue" if plan.requeues else "no-requeue"
    options = [*(f"{name}={value}" for name, value in wanted.items() if value), requeue, *plan.sbatch]
    # one process learns from Slurm that it is alone on its machine, and would start others
    flags = plan.train_flags(nproc=1 if plan.per_node == 1 else "auto")
    # the job's number stays when the job comes back, and so does the run folder
    out = [] if plan.config.execution.out else [f'--out runs/{plan.job}-"$SLURM_JOB_ID"']
    command = [shlex.quote(plan.config.recipe), *map(shlex.join, flags), *out]
    template = Template(_SLURM, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return str(template.render(plan=plan, options=options, command=command))


@dataclass(frozen=True)
class KubernetesPlan(Allotted):
    """A run as a PyTorchJob of Kubeflow's, one pod on each machine; torchrun in it starts the processes."""

    image: str = ""
    """Container image with torch and Lockstep."""
    claim: str = "lockstep"
    """Claim of a volume that all pods can mount: for runs/ and data/."""
    grace_period: int = 90
    """Seconds between SIGTERM and SIGKILL, for the last checkpoint."""


def kubernetes(plan: KubernetesPlan) -> str:
    """A PyTorchJob for Kubeflow's Training Operator, as JSON, which kubectl takes as it takes YAML."""
    require(bool(plan.image), "a job on Kubernetes needs an image", "Name one with torch and Lockstep: --image.")
    data = {} if plan.config.execution.data_dir else {"data_dir": f"{_MOUNT}/data"}
    # torchrun takes the rest from PET_ variables, which the operator sets; its RANK and WORLD_SIZE count pods
    words = ["torchrun", *plan.torchrun_arguments(f"{_MOUNT}/runs/{plan.job}", **data)]
    command = [word.replace("$", "$$") for word in words]  # Kubernetes expands $(NAME) and reads $$ as $
    firm = {"memory": plan.memory, "nvidia.com/gpu": str(plan.gpus_per_node or "")}
    firm = {name: value for name, value in firm.items() if value}
    resources = {"requests": {"cpu": str(plan.cores * plan.per_node)} | firm} | ({"limits": firm} if firm else {})
    mounts = [{"name": "lockstep", "mountPath": _MOUNT}, {"name": "shm", "mountPath": "/dev/shm"}]
    container = {"name": "pytorch", "image": plan.image, "command": command, "resources": resources}
    claim = {"name": "lockstep", "persistentVolumeClaim": {"claimName": plan.claim}}
    pod = {
        "terminationGracePeriodSeconds": plan.grace_period,
        "containers": [container | {"volumeMounts": mounts}],
        # for loader workers: a container's own has 64 MiB
        "volumes": [claim, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    # OnFailure, not ExitCode: where one pod dies the others end with code 1, which ExitCode takes for final
    one = {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    workers = {"Worker": one | {"replicas": plan.nnodes - 1}} if plan.nnodes > 1 else {}
    restarts = plan.config.recovery.max_restarts * plan.nnodes
    spec = {
        "nprocPerNode": str(plan.per_node),
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": restarts},
        "pytorchReplicaSpecs": {"Master": one, **workers},
    }
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": plan.job}, "spec": spec}
    return json.dumps(job, indent=2) + "\n"


@dataclass(frozen=True)
class TorchrunPlan(Plan):
    """A run by torchrun on machines without a scheduler."""

    master_addr: Annotated[str, Arg(unset="with --nnodes")] = ""
    """Address of machine 0."""
    master_port: Annotated[int, Arg(unset="one that follows from --name")] = 0
    """Port on machine 0, where the machines meet."""
    min_nnodes: int = 0
    """Elastic: go on with so many machines where others are lost, and take them back (0: all or nothing)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.nnodes == 1 or self.master_addr
        require(known, "several machines need one meeting point", "Give --master-addr, machine 0's address.")
        require(0 <= self.master_port < 65536, f"--master-port {self.master_port} is not a port", "Use 1 to 65535.")
        message = f"--min-nnodes {self.min_nnodes} with --nnodes {self.nnodes}"
        require(0 <= self.min_nnodes <= self.nnodes, message, "It is at most as many as there are; give --nnodes too.")

    @classmethod
    def of(cls, config: Config, **chosen: Any) -> Self:
        """The plan for a recipe's config."""
        execution = config.execution
        return super().of(config, master_addr=execution.master_addr, master_port=execution.master_port, **chosen)


def torchrun(plan: TorchrunPlan) -> str:
    """torchrun's line for each machine, under a comment that says which."""
    execution, nodes = plan.config.execution, plan.nnodes
    each = "auto" if execution.nproc == "auto" else plan.per_node
    own = [f"--nproc-per-node={each}", f"--max-restarts={plan.config.recovery.max_restarts}"]
    own += plan.torchrun_arguments(f"runs/{plan.job}")
    port = plan.master_port or port_of(plan.job)
    if nodes == 1:
        machines = {"": ["--standalone"]}
    elif not plan.min_nnodes:
        at = [f"--master-addr={plan.master_addr}", f"--master-port={port}"]
        machines = {f"machine {k}": [f"--nnodes={nodes}", f"--node-rank={k}", *at] for k in range(nodes)}
    else:
        # by itself torchrun compares host names to find the one that listens, and on some machines none or all do
        hosts = {"machine 0": 1, "each of the others": 0}
        at = [f"--nnodes={plan.min_nnodes}:{nodes}", f"--rdzv-id={plan.job}", "--rdzv-backend=c10d"]
        at.append(f"--rdzv-endpoint={plan.master_addr}:{port}")
        machines = {name: [*at, f"--rdzv-conf=is_host={host}"] for name, host in hosts.items()}
    lines = {name: shlex.join(["torchrun", *where, *own]) for name, where in machines.items()}
    return "".join(f"# on {name}\n{line}\n" if name else f"{line}\n" for name, line in lines.items())


# what a run is started by -> its plan, and what writes it
TARGETS: dict[str, tuple[type[Plan], Callable[[Any], str]]] = {
    "slurm": (SlurmPlan, slurm),
    "kubernetes": (KubernetesPlan, kubernetes),
    "torchrun": (TorchrunPlan, torchrun),
}


def main(args: list[str]) -> int:
    """Print what starts a run on a cluster, or write it to a file, which can be run where it is a script."""
    usage = f"lockstep launch-script {'|'.join(TARGETS)} [RECIPE] [FLAGS]"
    if not args or args[0] in ("-h", "--help"):
        about = "Write a job file, or torchrun's command lines; for flags `lockstep launch-script slurm --help`."
        raise HelpAsked(NoFlags(), "", about)
    if args[0] not in TARGETS:
        raise unknown("target", args[0], TARGETS, f"As `{usage}`.")
    cls, script = TARGETS[args[0]]
    about = f"Write what starts the recipe `{{}}` by {args[0]}; every flag of `lockstep train` may follow."
    plan: Plan = planned(f"launch-script {args[0]}", cls.of, args[1:], about)
    text = script(plan)
    if not plan.file:
        print(text, end="")
        return 0
    path = Path(plan.file)
    try:
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}", "Name another file with --file.") from error
    return 0
