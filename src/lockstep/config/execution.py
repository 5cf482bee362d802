"""Where and how a run goes, and what happens when something goes wrong. No field changes the experiment."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.config.fields import Ints, Names, require, require_at_least, require_finite
from lockstep.errors import UserError, unknown

Strategy = Literal["single", "dp", "ddp", "fsdp"]
Device = Literal["auto", "cpu", "cuda", "mps", "xpu"]
ONE_PROCESS = ("single", "dp")  # whatever --nproc says
LOG_MIRRORS = ("csv", "tensorboard", "wandb", "mlflow", "trackio")


_LONGEST_S = 10_000_000  # four months
_SHORTEST_HANG_S = 0.1
_CORES_EACH, _MAX_AUTO = 2, 8  # more processes than that lose to start-up and all-reduce on one machine's cores
_MOST = {"nproc": 1024, "threads": 4096, "workers": 1024, "nnodes": 100_000}  # beyond them no machine goes


def processes_on(cores: int) -> int:
    """Processes that --nproc auto starts on so many CPU cores; --threads shares the cores out.

    One for two cores: a small network's kernels share two well, and a second process adds start-up and an all-reduce a
    step (benchmarks/split.py). On more cores a kernel's threads gain less and less, so more processes share them.
    """
    return min(max(1, cores // _CORES_EACH), _MAX_AUTO)


@dataclass(frozen=True)
class Execution:
    """Where and how fast the run goes; none of it changes what is learned."""

    out: Annotated[str, arg(help_behavior_hint="(default: runs/RECIPE-DATE-TIME)")] = ""
    """Run folder: config.json, journal.jsonl, weights/."""
    data_dir: Annotated[str, arg(help_behavior_hint="(default: $LOCKSTEP_DATA, else ./data)")] = ""
    """Where data sets live, or are put when they are downloaded."""
    nproc: Annotated[int | Literal["auto"], arg(aliases=["--nproc-per-node"])] = "auto"
    """Processes on this machine; auto: one per GPU, else one for two cores, at most 8."""
    strategy: Strategy = "ddp"
    """single: one process; dp: one, DataParallel on several GPUs; ddp: a whole model on each; fsdp: a part of it."""
    model_parallel: int = 1
    """Cut the model into this many stages, each on a device of its own; each process then drives as many devices."""
    device: Device = "auto"
    """Kind of device; auto takes the accelerator where there is one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """How ranks talk; auto: NCCL on NVIDIA, XCCL on Intel, gloo on the CPU (gloo also lets ranks share a GPU)."""
    gpus: Annotated[Ints, arg(help_behavior_hint="(default: all; see CUDA_VISIBLE_DEVICES)")] = ()
    """GPUs to use, as 0,2."""
    threads: int = 0
    """CPU threads per process (0: cores / processes on this machine)."""
    nnodes: int = 1
    """Machines in the run."""
    node_rank: int = 0
    """This machine's number, from 0."""
    master_addr: Annotated[str, arg(aliases=["--ip"], help_behavior_hint="(with --nnodes)")] = ""
    """Address of machine 0."""
    master_port: Annotated[int, arg(aliases=["--port"], help_behavior_hint="(default: a free one)")] = 0
    """Port on machine 0, where the processes meet; with --nnodes the same number on each machine."""
    collective_timeout: float = 600.0
    """Seconds that any rank waits for the others before the run ends with an error."""
    workers: int = 2
    """Processes that read images, for each training process (streaming loader)."""
    loader: Literal["auto", "resident", "streaming"] = "auto"
    """resident: in memory, batched; streaming: worker processes; auto: resident where the set fits."""
    cache: Annotated[str, arg(metavar="DIR|ram|auto", help_behavior_hint="(default: none)")] = ""
    """Keep pictures as --decode-size left them: in a folder, in memory (ram), or where they fit (auto)."""
    eval_batch_size: int = 250
    """Images per forward pass in evaluation."""
    eval_every: int = 1
    """Epochs between two evaluations; the last epoch has one in any case."""
    log: Annotated[Names, arg(help_behavior_hint="(default: none)")] = ()
    """Mirrors of the journal beside it in the run folder: csv, tensorboard, wandb, mlflow, trackio."""
    probe: bool = True
    """Before the first step, look for parts of the model whose result depends on --nproc, and name them."""
    duplicates: Literal["auto", "always", "never"] = "auto"
    """Before the first step, name pictures that are trained and validated on alike, by content; auto: up to 100,000."""
    log_every: int = 10
    """Steps between two `step` records of the journal, and between two moves of the progress bar."""

    def __post_init__(self) -> None:
        require_finite(self)
        for name in self.log:
            if name not in LOG_MIRRORS:
                raise unknown("log", name, LOG_MIRRORS, "Separate several with commas, as --log csv,tensorboard.")
        require(self.nproc == "auto" or self.nproc >= 1, f"--nproc {self.nproc} starts no process", "Use 1 or more.")
        require_at_least(1, self, "nnodes", "eval_batch_size", "eval_every", "log_every", "model_parallel")
        require_at_least(0, self, "workers", "threads")
        require(
            0 < self.collective_timeout <= _LONGEST_S,
            f"--collective-timeout {self.collective_timeout} is not between 0 and {_LONGEST_S:,} seconds",
            "Give seconds, as 600.",
        )
        for name, most in _MOST.items():
            value, flag = getattr(self, name), name.replace("_", "-")
            require(value == "auto" or value <= most, f"--{flag} {value} is too much", f"Use {most:,} at most.")
        require(0 <= self.master_port < 65536, f"--master-port {self.master_port} is not a port", "Use 1 to 65535.")
        require(
            0 <= self.node_rank < self.nnodes,
            f"--node-rank {self.node_rank} with --nnodes {self.nnodes}",
            f"Machines are numbered 0 to {self.nnodes - 1}; give --nnodes too.",
        )
        require(
            self.nnodes == 1 or (bool(self.master_addr) and self.master_port > 0),
            "several machines need one meeting point",
            "Give --master-addr (machine 0's address) and --master-port, the same on every machine.",
        )
        require(
            self.model_parallel == 1 or self.strategy in ("single", "ddp"),
            f"--model-parallel {self.model_parallel} with --strategy {self.strategy}: both spread one model",
            "Leave one of the two out.",
        )
        require(
            self.strategy != "single" or (self.nproc in (1, "auto") and self.nnodes == 1),
            f"--strategy single is one process, not {self.nproc} on {self.nnodes} machine(s)",
            "Drop --nproc, or use --strategy ddp.",
        )
        require(
            self.strategy != "dp" or (self.nproc in (1, "auto") and self.nnodes == 1),
            "--strategy dp drives all GPUs from one process",
            "Drop --nproc, or use --strategy ddp for several processes.",
        )


@dataclass(frozen=True)
class Interval:
    """How often: after so many steps, epochs or minutes; 0 is never."""

    count: float
    unit: str  # "steps", "epoch" or "min"

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """From `500steps`, `1epoch`, `10min` or `0`."""
        if text.strip() in ("0", "never"):
            return cls(0, "steps")
        found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*(step|epoch|min)(?:s|utes?)?\s*", text)
        count = float(found[1]) if found else 0.0
        if found is None or count <= 0 or (found[2] != "min" and count != int(count)):
            raise UserError(
                f"--checkpoint-every {text}: not a number of steps, epochs or minutes",
                "Write it as 500steps, 1epoch, 10min, or 0 for never.",
            )
        return cls(count, {"step": "steps"}.get(found[2], found[2]))

    def due(self, steps: int, steps_per_epoch: int, seconds: float) -> bool:
        """True where it is time after `steps` steps, `seconds` after the last time."""
        if self.count == 0:
            return False
        if self.unit == "min":
            return seconds >= self.count * 60
        return steps % int(self.count if self.unit == "steps" else self.count * steps_per_epoch) == 0


def _seconds(text: str) -> float:
    """From `6h`, `90min`, `30s` or `1.5d`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|m|h|d)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"--max-time {text}: not a time", "Write it as 6h, 90min, 30s or 1.5d.")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2][0]]


@dataclass(frozen=True)
class Recovery:
    """What happens when something goes wrong; none of it changes what is learned."""

    checkpoint_every: str = "1epoch"
    """How often to checkpoint: 500steps, 1epoch, 10min, or 0 for never."""
    keep: int = 2
    """Checkpoints to keep beside the best."""
    max_time: Annotated[str, arg(help_behavior_hint="(default: none)")] = ""
    """End with a checkpoint after this long, restarts included, as 6h, 90min or 1.5d; the same command goes on."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint in --out; never; or the path of a run or a checkpoint."""
    override: Annotated[Names, arg(help_behavior_hint="(default: none)")] = ()
    """What may differ from the checkpoint on resume, as lr,epochs."""
    max_restarts: int = 3
    """Restart from the newest checkpoint when a process is killed or hangs, at most this often."""
    min_nproc: int = 0
    """Restart with fewer processes, down to this, where one made no progress (0: never fewer)."""
    on_hangup: Literal["auto", "continue", "stop"] = "auto"
    """When the terminal closes; auto: go on if it is gone for good, else checkpoint and stop."""
    hang_timeout: float = 300.0
    """Seconds without progress on a rank before the run ends with a report (0: wait for ever)."""
    check_every: int = 500
    """Steps between two comparisons of weights and optimizer over all ranks (0: never)."""

    @property
    def max_seconds(self) -> float:
        """`max_time`, read; 0 for no limit."""
        return _seconds(self.max_time) if self.max_time else 0.0

    @property
    def checkpoint_interval(self) -> Interval:
        """`checkpoint_every`, read."""
        return Interval.parse(self.checkpoint_every)

    def __post_init__(self) -> None:
        require_finite(self)
        Interval.parse(self.checkpoint_every)
        require(
            not self.max_seconds or self.checkpoint_interval.count > 0,
            f"--max-time {self.max_time} with --checkpoint-every {self.checkpoint_every}: nothing would be kept to go "
            "on from",
            "Leave one of the two out.",
        )
        require(self.keep >= 1, f"--keep {self.keep} would keep no checkpoint", "Use 1 or more.")
        require_at_least(0, self, "max_restarts", "min_nproc", "hang_timeout", "check_every")
        require(
            not 0 < self.hang_timeout < _SHORTEST_HANG_S,
            f"--hang-timeout {self.hang_timeout} is shorter than a step",
            "Give seconds, as 300, or 0 to wait for ever.",
        )
