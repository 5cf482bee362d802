"""What a run is: frozen dataclasses, validated at birth.

`Config` splits in two: the experiment (data, model, optim and the fields of `Config` itself) decides the result;
`Execution` decides only where and how fast it runs. No field of `Execution` may change what is learned, except through
rounding and, without `sync_bn`, through the batch statistics of batch normalisation.
"""

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tyro.conf import Fixed, arg
from tyro.constructors import PrimitiveConstructorSpec

from lockstep.errors import UserError, unknown

OptimizerName = Literal["sgd", "adam", "adamw", "adadelta", "muon"]
ScheduleName = Literal["constant", "step", "multistep", "cosine", "one-cycle"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Strategy = Literal["single", "dp", "ddp"]

# written out, because importing the models costs seconds and help should not; a test holds the two equal
_MODEL_HELP = (
    "Ours: digits_net, lenet5, mlp, mnist_net, resnet18_cifar, resnet34_cifar, resnet50_cifar, resnet101_cifar, "
    "resnet152_cifar; or any of torchvision's (resnet18, vit_b_16, ...) or timm's; or package.module:factory."
)
LOG_MIRRORS = ("csv", "tensorboard", "wandb")


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _comma_separated(of: type, metavar: str) -> PrimitiveConstructorSpec[Any]:
    """A flag that takes `a,b,c` as one word, as `--gpus 0,2` is written everywhere else."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: tuple(of(part) for part in _split(args[0])),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(str(part) for part in value)],
    )


Ints = Annotated[tuple[int, ...], _comma_separated(int, "INT,INT,...")]
Floats = Annotated[tuple[float, ...], _comma_separated(float, "FLOAT,FLOAT,...")]
Names = Annotated[tuple[str, ...], _comma_separated(str, "NAME,NAME,...")]


def _require_finite(group: Any) -> None:
    for item in dataclasses.fields(group):
        value = getattr(group, item.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"--{item.name.replace('_', '-')} {number} is not a finite number", "Give a number.")


def _require(condition: bool, message: str, remedy: str = "") -> None:
    if not condition:
        raise UserError(message, remedy)


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how the training set is augmented."""

    dataset: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, folder, or package.module:factory."""
    fraction: float = 1.0
    """Train on this part of the set: a random subset by --seed, the same on any number of processes."""
    crop_padding: int = 0
    """Pad by this many pixels and crop at random (0: off)."""
    flip: bool = False
    """Flip half of the images left to right."""
    cutout: int = 0
    """Blank a random square of this side, in pixels (0: off)."""
    resized_crop: bool = False
    """Train on random crops of random scale and aspect (image folders)."""
    image_size: int = 0
    """Side of the images that the model sees, in pixels (0: as stored)."""
    drop_last: bool = False
    """Leave out the short last batch of an epoch."""

    def __post_init__(self) -> None:
        _require(
            0 < self.fraction <= 1,
            f"--fraction {self.fraction} is not in (0, 1]",
            "Give the part of the training set to use, as 0.25.",
        )
        for name in ("crop_padding", "cutout", "image_size"):
            flag = name.replace("_", "-")
            _require(getattr(self, name) >= 0, f"--{flag} {getattr(self, name)} is negative", "Use 0 to turn it off.")


@dataclass(frozen=True)
class ModelConfig:
    """Which network, and in which form it runs."""

    model: Annotated[str, arg(help=_MODEL_HELP)] = "digits_net"
    sync_bn: bool = False
    """Batch statistics over the global batch, so that N changes nothing (works on the CPU too)."""
    channels_last: bool = False
    """Keep images as NHWC in memory: faster convolutions on most hardware."""
    compile: bool = False
    """Compile the model with torch.compile."""
    find_unused_parameters: bool = False
    """Let DDP accept parameters that take no part in the loss (costs a graph walk a step)."""


@dataclass(frozen=True)
class OptimConfig:
    """How the weights move."""

    optimizer: OptimizerName = "sgd"
    """Muon takes the matrices and convolutions; AdamW the rest."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 0.1
    """Peak learning rate, meant for batches of --base-batch-size."""
    momentum: float = 0.9
    """Momentum of SGD and Muon."""
    nesterov: bool = False
    """Nesterov momentum (SGD)."""
    weight_decay: float = 0.0
    """Weight decay, applied to every parameter."""
    schedule: ScheduleName = "cosine"
    """Course of the learning rate over the run."""
    warmup_epochs: float = 0.0
    """Rise linearly from 1 % of the rate over this many epochs first."""
    step_epochs: float = 1.0
    """Epochs between two drops (step)."""
    milestones: Annotated[Floats, arg(help_behavior_hint="(default: none)")] = ()
    """Epochs after which the rate drops (multistep)."""
    gamma: float = 0.1
    """Factor of a drop (step, multistep)."""
    scale_lr: Literal["linear", "sqrt", "none"] = "none"
    """Scale the rate with --batch-size / --base-batch-size, or with its square root."""
    base_batch_size: int = 0
    """The batch size that --lr is meant for (0: this run's)."""
    clip_norm: float = 0.0
    """Clip the global gradient norm to this (0: off)."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which is then what is evaluated (0: off)."""

    def __post_init__(self) -> None:
        _require_finite(self)
        _require(self.lr > 0, f"--lr {self.lr} is not positive", "Give a positive learning rate, as 0.1.")
        _require(self.warmup_epochs >= 0, f"--warmup-epochs {self.warmup_epochs} is negative", "Use 0 for none.")
        _require(self.step_epochs > 0, f"--step-epochs {self.step_epochs} is not positive", "Give epochs, as 1.")
        _require(0 <= self.momentum < 1, f"--momentum {self.momentum} is not in [0, 1)", "A usual momentum is 0.9.")
        _require(self.weight_decay >= 0, f"--weight-decay {self.weight_decay} is negative", "Use 0 to turn it off.")
        _require(self.gamma > 0, f"--gamma {self.gamma} is not positive", "Give the factor of a drop, as 0.1.")
        _require(self.base_batch_size >= 0, f"--base-batch-size {self.base_batch_size} is negative", "Use 0 for none.")
        _require(
            self.schedule != "multistep" or bool(self.milestones),
            "--schedule multistep without --milestones never drops",
            "Give the epochs of the drops, as --milestones 100,150, or use --schedule constant.",
        )
        _require(
            0 <= self.label_smoothing < 1,
            f"--label-smoothing {self.label_smoothing} is not in [0, 1)",
            "Use 0 to turn it off; a usual value is 0.1.",
        )
        _require(0 <= self.ema < 1, f"--ema {self.ema} is not in [0, 1)", "A usual decay is 0.999.")
        _require(self.clip_norm >= 0, f"--clip-norm {self.clip_norm} is negative", "Use 0 to turn clipping off.")
        _require(
            not self.nesterov or (self.optimizer == "sgd" and self.momentum > 0),
            "--nesterov needs --optimizer sgd with a positive --momentum",
            "Drop --nesterov (or add --no-nesterov, where the recipe has it).",
        )


@dataclass(frozen=True)
class Execution:
    """Where and how fast the run goes; none of it changes what is learned."""

    out: Annotated[str, arg(help_behavior_hint="(default: runs/RECIPE-DATE-TIME)")] = ""
    """Run folder: config.json, journal.jsonl, weights/."""
    data_dir: Annotated[str, arg(help_behavior_hint="(default: $LOCKSTEP_DATA, else ./data)")] = ""
    """Where data sets live, or are put when they are fetched."""
    nproc: Annotated[int | Literal["auto"], arg(aliases=["--nproc-per-node"])] = "auto"
    """Processes on this machine; auto: one per GPU, else one per core, at most 8."""
    strategy: Strategy = "ddp"
    """single: one process; dp: DataParallel, one process on several GPUs; ddp: DistributedDataParallel."""
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """Kind of device; auto takes the accelerator where there is one."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """How ranks talk; auto: NCCL on CUDA, gloo on the CPU (gloo also lets ranks share a GPU)."""
    gpus: Annotated[Ints, arg(help_behavior_hint="(default: all that CUDA_VISIBLE_DEVICES shows)")] = ()
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
    timeout: float = 600.0
    """Seconds that any rank waits for the others before the run ends with an error."""
    workers: int = 2
    """Processes that read images, for each training process (streaming loader)."""
    loader: Literal["auto", "resident", "streaming"] = "auto"
    """resident: in memory, batched; streaming: worker processes; auto: resident where the set fits."""
    eval_batch_size: int = 250
    """Images per forward pass in evaluation."""
    log: Annotated[Names, arg(help_behavior_hint="(default: none)")] = ()
    """Mirrors of the journal beside it in the run folder: csv, tensorboard, wandb."""
    log_every: int = 10
    """Steps between two `step` records of the journal, and between two moves of the progress bar."""

    def __post_init__(self) -> None:
        _require_finite(self)
        for name in self.log:
            if name not in LOG_MIRRORS:
                raise unknown("log", name, LOG_MIRRORS, "Separate several with commas, as --log csv,tensorboard.")
        _require(self.nproc == "auto" or self.nproc >= 1, f"--nproc {self.nproc} starts no process", "Use 1 or more.")
        for name in ("nnodes", "eval_batch_size", "log_every"):
            flag = name.replace("_", "-")
            _require(getattr(self, name) >= 1, f"--{flag} {getattr(self, name)} is not positive", "Use 1 or more.")
        for name in ("workers", "threads"):
            _require(getattr(self, name) >= 0, f"--{name} {getattr(self, name)} is negative", "Use 0 or more.")
        _require(self.timeout > 0, f"--timeout {self.timeout} is not positive", "Give seconds, as 600.")
        _require(0 <= self.master_port < 65536, f"--master-port {self.master_port} is not a port", "Use 1 to 65535.")
        _require(
            0 <= self.node_rank < self.nnodes,
            f"--node-rank {self.node_rank} with --nnodes {self.nnodes}",
            f"Machines are numbered 0 to {self.nnodes - 1}; give --nnodes too.",
        )
        _require(
            self.nnodes == 1 or (bool(self.master_addr) and self.master_port > 0),
            "several machines need one meeting point",
            "Give --master-addr (machine 0's address) and --master-port, the same on every machine.",
        )
        _require(
            self.strategy != "single" or (self.nproc in (1, "auto") and self.nnodes == 1),
            f"--strategy single is one process, not {self.nproc} on {self.nnodes} machine(s)",
            "Drop --nproc, or use --strategy ddp.",
        )
        _require(
            self.strategy != "dp" or (self.nproc in (1, "auto") and self.nnodes == 1),
            "--strategy dp drives all GPUs from one process",
            "Drop --nproc, or use --strategy ddp for several processes.",
        )


@dataclass(frozen=True)
class Config:
    """A training run."""

    recipe: Fixed[str] = "digits"
    epochs: int = 10
    """Passes over the training set."""
    batch_size: int = 64
    """Global batch size: samples per optimizer step over all processes."""
    accumulate: int = 1
    """Cut each global batch into this many micro-batches (less memory, same step)."""
    shards: int = 0
    """Exact mode: cut each batch into so many shards; the same bits on any number of processes up to that (0: off)."""
    seed: int = 0
    """Seed of weights, order, augmentation and dropout."""
    precision: Precision = "fp32"
    """fp32, tf32 (NVIDIA GPUs), or autocast to bf16 or fp16 (fp16 with a gradient scaler)."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, f"--epochs {self.epochs} trains nothing", "Use 1 or more.")
        _require(self.batch_size >= 1, f"--batch-size {self.batch_size} is empty", "Use 1 or more.")
        _require(
            1 <= self.accumulate <= self.batch_size,
            f"--accumulate {self.accumulate} cuts a batch of {self.batch_size} into empty pieces",
            f"Use 1 to {self.batch_size}.",
        )
        if self.shards:
            self._require_exact()
        nproc, nodes = self.execution.nproc, self.execution.nnodes
        if nproc != "auto":
            self.require_batch_for(nproc * nodes)

    def _require_exact(self) -> None:
        """Refuse what exact mode can't make the same on any number of processes."""
        mode = f"--shards {self.shards}"
        _require(
            1 <= self.shards <= self.batch_size,
            f"{mode} of a batch of {self.batch_size}: a shard needs a sample",
            f"Use 1 to {self.batch_size} (0: off).",
        )
        _require(
            self.execution.strategy == "ddp",
            f"{mode} with --strategy {self.execution.strategy}: DataParallel adds floats in an order of its own"
            if self.execution.strategy == "dp"
            else f"{mode} with --strategy {self.execution.strategy}",
            "Leave --strategy out; --nproc 1 is one process.",
        )
        _require(
            not self.model.sync_bn,
            f"{mode} with --sync-bn: each shard has its own batch statistics, the same on any number of processes",
            "Leave one of the two out.",
        )
        _require(
            not self.model.compile,
            f"{mode} with --compile: a compiled kernel depends on the batch shapes that its process has met",
            "Leave one of the two out.",
        )
        _require(
            self.precision != "tf32",
            f"{mode} with --precision tf32: exact mode switches TF32 off",
            "Use fp32, bf16 or fp16.",
        )

    def require_batch_for(self, processes: int) -> None:
        """Raise UserError where some process would have no sample in a full batch, or no shard."""
        if self.shards:
            _require(
                processes <= self.shards,
                f"--shards {self.shards} can't be shared out over {processes} processes",
                f"Use at most --nproc {self.shards}, or more shards.",
            )
            return
        _require(
            processes <= self.batch_size // self.accumulate,
            f"a batch of {self.batch_size}"
            + (f" in {self.accumulate} micro-batches" if self.accumulate > 1 else "")
            + f" is smaller than the {processes} processes that share it",
            f"--batch-size is global: give at least {processes * self.accumulate}, or fewer processes with --nproc.",
        )

    @property
    def lr(self) -> float:
        """The peak learning rate, scaled to the batch size by `optim.scale_lr`."""
        ratio = self.batch_size / (self.optim.base_batch_size or self.batch_size)
        return self.optim.lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.optim.scale_lr]

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """The inverse of `to_dict`. What is missing keeps its default: an older version wrote it.

        Raises:
            UserError: for an unknown entry or one of another type, naming it, and for values that make no run.
        """
        return typing.cast("Config", _from_dict(cls, values, "config"))


def _from_dict(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{where} is {values!r}, not a group of entries", "Was config.json edited?")
    hints = typing.get_type_hints(cls)
    if strange := set(values) - set(hints):
        raise UserError(
            f"{where} has unknown entries: {', '.join(sorted(map(str, strange)))}", "Was it written by a newer version?"
        )
    return cls(**{name: _plain(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _plain(hint: Any, value: Any, where: str) -> Any:
    """A value from JSON as a field of this type: lists become tuples, whole numbers may stand for floats."""
    if dataclasses.is_dataclass(hint):
        return _from_dict(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_plain(args[0], item, where) for item in value)
    if _fits(hint, value):
        return value
    raise UserError(f"{where} is {value!r}", f"It takes {_in_words(hint)}; was config.json edited?")


def _fits(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if args := typing.get_args(hint):  # a union
        return any(_fits(arg, value) for arg in args)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _in_words(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if typing.get_origin(hint) is tuple:
        return "a list"
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    return words.get(hint) or " or ".join(_in_words(arg) for arg in typing.get_args(hint))
