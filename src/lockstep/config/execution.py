"""Where and how a run goes, and what happens when something goes wrong. No field changes the experiment.

What `lockstep eval` takes.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from lockstep.config.conflicts import check
from lockstep.config.fields import Arg, Count, Ints, Names, Positive, require
from lockstep.errors import require_no_secrets, unknown

Strategy = Literal["ddp", "fsdp"]
Law = Literal["warn", "strict", "off"]
Device = Literal["auto", "cpu", "cuda", "xpu"]
LOG_MIRRORS = ("csv", "tensorboard", "wandb", "mlflow", "trackio")
_CORES_EACH, _MAX_AUTO = 2, 8  # more processes than that lose to start-up and all-reduce on one machine's cores
_INTERVAL = r"\s*(\d{1,15}(?:\.\d+)?)\s*(step|epoch|min)(?:s|utes?)?\s*"
_TIME = r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|m|h|d)\s*"


def processes_on(cores: int) -> int:
    """Processes that --nproc auto starts on so many CPU cores; --threads shares the cores out.

    One for two cores: a small network's kernels share two well, and a second process adds start-up and an all-reduce a
    step (benchmarks/split.py). On more cores a kernel's threads gain less and less, so more processes share them.
    """
    return min(max(1, cores // _CORES_EACH), _MAX_AUTO)


@dataclass(frozen=True)
class Execution:
    """Where and how fast the run goes; none of it changes what is learned."""

    out: Annotated[str, Arg(unset="runs/RECIPE-DATE-TIME")] = ""
    """Run folder, or where a store keeps it, as s3://bucket/run; a run that is there goes on."""
    data_dir: Annotated[str, Arg(unset="$LOCKSTEP_DATA, else ./data")] = ""
    """Where data sets lie, or are put."""
    nproc: Annotated[int | Literal["auto"], Arg(least=1, most=1024)] = "auto"
    """Processes on this machine. auto: one per GPU, else one for two cores, at most 8."""
    strategy: Strategy = "ddp"
    """single: one process; ddp: a whole model on each; fsdp: a part of it."""
    device: Device = "auto"
    """Kind of device; auto takes the accelerator where there is one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """How ranks talk; auto: NCCL on NVIDIA, XCCL on Intel, gloo on the CPU (gloo also lets ranks share a GPU)."""
    gpus: Annotated[Ints, Arg(unset="all; see CUDA_VISIBLE_DEVICES")] = ()
    """Which GPUs, as 0,2."""
    threads: Annotated[int, Arg(least=0, most=4096)] = 0
    """CPU threads per process (0: cores / processes on this machine)."""
    nnodes: Annotated[int, Arg(least=1, most=100_000)] = 1
    """Machines in the run."""
    node_rank: Count = 0
    """This machine's number, from 0."""
    master_addr: Annotated[str, Arg(unset="with --nnodes")] = ""
    """Address of machine 0."""
    master_port: Annotated[int, Arg(least=0, most=65535)] = 0
    """Port on machine 0, where the processes meet (0: a free one); with --nnodes the same on each machine."""
    collective_timeout: Annotated[float, Arg(above=0, most=10_000_000)] = 600.0
    """Seconds that any rank waits for the others before the run ends with an error."""
    workers: Annotated[int, Arg(least=0, most=1024)] = 2
    """Processes that read pictures, for each process. A set that fits into memory needs none (--loader)."""
    loader: Literal["auto", "resident", "streaming"] = "auto"
    """resident: in memory, batched; streaming: worker processes; auto: resident where the set fits."""
    cache: Annotated[str, Arg(metavar="DIR|auto", unset="none")] = ""
    """Keep pictures as --decode-size left them: in a folder, or below ~/.cache where they fit (auto)."""
    eval_batch_size: Positive = 250
    """Images per forward pass in evaluation."""
    eval_every: Positive = 1
    """Epochs between two evaluations; the last epoch has one in any case."""
    log: Annotated[Names, Arg(unset="none")] = ()
    """csv, tensorboard, wandb, mlflow, trackio. Mirrors of the journal, beside it in the run folder."""
    law: Law = "warn"
    """Steps 0, 1, 2, 4, ... are taken again, shared out otherwise; what --nproc changes: warn, strict (end), or off."""
    duplicates: Literal["auto", "always", "never"] = "auto"
    """Before the first step, name pictures that are trained and validated on alike, by content; auto: up to 100,000."""
    log_every: Positive = 10
    """Steps between two `step` records of the journal, and between two moves of the progress bar."""
    verbose: bool = False
    """Say more at the start. How cores are shared out, where ranks listen, which parameters are not decayed."""

    def __post_init__(self) -> None:
        check(self)
        for name in self.log:
            if name not in LOG_MIRRORS:
                raise unknown("log", name, LOG_MIRRORS, "Separate several with commas, as --log csv,tensorboard.")
        require_no_secrets(self.out, "--out ")
        require(
            self.node_rank < self.nnodes,
            f"--node-rank {self.node_rank} with --nnodes {self.nnodes}",
            f"Machines are numbered 0 to {self.nnodes - 1}; give --nnodes too.",
        )
        require(
            self.nnodes == 1 or (self.master_addr and self.master_port > 0),
            "several machines need one address to meet at",
            "Give --master-addr (machine 0's address) and --master-port, the same on every machine.",
        )


@dataclass(frozen=True)
class Interval:
    """How often: after so many steps, epochs or minutes; 0 is never."""

    count: float
    unit: str  # "steps", "epoch" or "min"

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """From `500steps`, `1epoch`, `10min` or `0`."""
        found = re.fullmatch(_INTERVAL, text)
        if found is None:
            return cls(0, "steps")
        return cls(float(found[1]), "steps" if found[2] == "step" else found[2])

    def due(self, steps: int, steps_per_epoch: int, seconds: float) -> bool:
        """True where it is time after `steps` steps, `seconds` after the last time."""
        if self.count == 0:
            return False
        if self.unit == "min":
            return seconds >= self.count * 60
        return steps % int(self.count if self.unit == "steps" else self.count * steps_per_epoch) == 0


@dataclass(frozen=True)
class Recovery:
    """What happens when something goes wrong; none of it changes what is learned."""

    checkpoint_every: Annotated[
        str, Arg(form=rf"\s*0\s*|never|{_INTERVAL}", takes="a time as 500steps, 1epoch or 10min, or 0 for never")
    ] = "1epoch"
    """How often to checkpoint: 500steps, 1epoch, 10min, or 0 for never."""
    keep: Positive = 2
    """Checkpoints to keep beside the best."""
    max_time: Annotated[str, Arg(form=f"|{_TIME}", takes="a time as 6h, 90min, 30s or 1.5d", unset="none")] = ""
    """End with a checkpoint after this long, restarts included, as 6h, 90min or 1.5d; the same command goes on."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint in --out; never; or the path of a run or a checkpoint."""
    override: Annotated[Names, Arg(unset="none")] = ()
    """What may differ from the checkpoint on resume, as lr,epochs."""
    max_restarts: Count = 3
    """Restart from the newest checkpoint when a process is killed or hangs, at most this often."""
    hang_timeout: Annotated[float, Arg(least=0)] = 300.0
    """Seconds without progress on a rank before the run ends with a report (0: wait for ever)."""
    check_every: Count = 500
    """Steps between two comparisons of weights and optimizer over all ranks (0: never)."""

    @property
    def max_seconds(self) -> float:
        """`max_time` in seconds; 0 for no limit."""
        found = re.fullmatch(_TIME, self.max_time)
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2][0]] if found else 0.0

    @property
    def checkpoint_interval(self) -> Interval:
        """`checkpoint_every`, read."""
        return Interval.parse(self.checkpoint_every)

    def __post_init__(self) -> None:
        check(self)
        interval, name = self.checkpoint_interval, f"--checkpoint-every {self.checkpoint_every}"
        require(
            interval.unit == "min" or interval.count % 1 == 0,
            f"{name} is a part of a step or epoch",
            "Give a whole number.",
        )
        require(not self.max_time or self.max_seconds, f"--max-time {self.max_time} ends at once", "Give it as 6h.")
        require(
            self.hang_timeout == 0 or self.hang_timeout >= 0.1,
            f"--hang-timeout {self.hang_timeout} is shorter than a step",
            "Give seconds, as 300, or 0 to wait for ever.",
        )


# not what writes, and not the size of a chunk: other shapes would round otherwise than the run did
NOT_EVALUATIONS = (
    *("out", "cache", "log", "log_every", "eval_every", "eval_batch_size", "duplicates"),
    *("law", "verbose"),
)


@dataclass(frozen=True)
class Evaluation:
    """What `lockstep eval` takes beside the run folder."""

    weights: Literal["best", "final"] = "best"
    """Which of the run's saved weights."""
    data: Annotated[str, Arg(unset="the run's")] = ""
    """Other labelled pictures: a folder, a table, or what --dataset takes; classes are matched by their names."""
    follow_links: bool = False
    """Follow symbolic links that lead out of that folder, or the table's."""
    report: Annotated[str, Arg(unset="none")] = ""
    """Scores by class as a file: .csv (precision, recall, F1) or .json (and the confusion matrix)."""
    trust_code: bool = False
    """Import and call the code that the folder's config.json names, as --model package.module:factory did."""
    execution: Execution = field(default_factory=Execution, metadata={"hidden": NOT_EVALUATIONS})
    """Where the evaluation goes."""
