"""A run traced on each rank, through the parts that `train` uses: what it did, step by step. JSON and safetensors."""

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.checkpoint import weights
from lockstep.config import Config
from lockstep.config.objects import load_object
from lockstep.data.loaders import Batch, EvalLoader, TrainLoader
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.monitoring import desync
from lockstep.parallel.batchnorm import batch_norms
from lockstep.parallel.buffers import average_buffers
from lockstep.parallel.fsdp import whole
from lockstep.parallel.module_state import as_real, preserved_buffers, replaced
from lockstep.randomness import bits, stream
from lockstep.training.assemble import Run, assemble
from lockstep.training.evaluation import evaluate
from lockstep.training.loop import steps
from lockstep.training.outcomes import Finding
from lockstep.training.precision import at_least
from lockstep.training.state import State

SAMPLES = 32  # entries of a tensor that are kept for every step, evenly spaced
KINDS = ("weights", "buffers", "gradients", "optimizer")  # of the tensors that are followed


@dataclass(frozen=True)
class Job:
    """One run to trace. `folder` is to hold its trace; config.execution says on how many processes and threads."""

    folder: str
    config: Config
    steps: int
    patch: str = ""
    wide: bool = False  # in float64
    reordered: bool = False  # folders are listed in another order
    closely: bool = False  # the self-check looks at every step


@dataclass
class Trace:
    """A run on N processes. Lists hold one entry a step, as rank 0 has it unless it says otherwise."""

    processes: int
    names: list[str] = field(default_factory=list)  # of the tensors that are followed
    kinds: list[str] = field(default_factory=list)  # of each of them, one of KINDS
    ledger: list[str] = field(default_factory=list)
    images: list[int] = field(default_factory=list)  # fingerprint of the global batch as the model sees it
    loss: list[float] = field(default_factory=list)  # mean over the global batch
    norm: list[float] = field(default_factory=list)  # of the gradient that the optimizer gets; nan where it skipped
    skipped: list[bool] = field(default_factory=list)  # the optimizer was not called
    lr: list[list[float]] = field(default_factory=list)  # of each parameter group
    digests: list[list[int]] = field(default_factory=list)  # of each tensor after the step; and at the end
    diverged: list[tuple[int, int, str]] = field(default_factory=list)  # (step, rank, what) that is not as on rank 0
    metrics: dict[str, float] | None = None
    batch_norm: bool = False
    law: dict[str, str] = field(default_factory=dict)  # what the self-check said, by the same without size and step
    weights_sha256: str = ""  # as `train` writes it in its `end` record
    kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """samples/NAME: float64 [steps, entries], of each tensor after each step; final/NAME: the whole tensor at the end;
    scales: float64 [steps + 1, tensors], the largest magnitude of each after each step and at the end."""

    def of(self, *kinds: str) -> list[int]:
        """The places in `names` of tensors of these kinds."""
        return [i for i, kind in enumerate(self.kinds) if kind in kinds]


def write(trace: Trace, folder: Path) -> None:
    """Write trace.json and trace.safetensors into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: value for name, value in vars(trace).items() if name != "kept"}
    (folder / "trace.json").write_text(json.dumps(plain), encoding="utf-8")
    save_file(trace.kept, folder / "trace.safetensors")


def read(folder: Path) -> Trace:
    """The trace that `write` left in a folder."""
    trace = Trace(**json.loads((folder / "trace.json").read_text(encoding="utf-8")))
    trace.kept = load_file(folder / "trace.safetensors")
    return trace


def trace_run(world: World, job: Job) -> None:
    """Run a job on this process, as one of the world's."""
    with listed_otherwise() if job.reordered else nullcontext():
        trace = _trace(world, job)
    if world.rank == 0:
        write(trace, Path(job.folder))
    world.barrier()


_listdir, _scandir = os.listdir, os.scandir


def _reordered(entries: list[Any]) -> list[Any]:
    """Every second one from the last on, then the others: no end stays, nor what stands at regular distances."""
    return entries[::-2] + entries[-2::-2]


class _Scandir(ExitStack, Iterator[Any]):
    """What os.scandir returns, in another order. Nothing is open: all was read at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        with _scandir(*args) as entries:
            self.entries = iter(_reordered([*entries]))

    def __next__(self) -> Any:
        return next(self.entries)


def listed_otherwise() -> AbstractContextManager[None]:
    """Within, os and pathlib list folders in another order: file systems promise none."""
    return replaced(os, listdir=lambda *args: _reordered(_listdir(*args)), scandir=_Scandir)


def _trace(world: World, job: Job) -> Trace:
    config = job.config
    if job.wide:
        config = replace(config, precision="fp32", model=replace(config.model, compile=False))
    run = assemble(config, world, torch.float64 if job.wide else None)
    if job.wide:  # before a patch, which may put something around the step
        vars(run.step)["take_passes"] = at_least(torch.float64, run.step.take_passes)
    if job.patch:
        load_object(job.patch, "patch")(run, world, config)
    if job.wide:
        _widen(run.train)
        _widen(run.val)
    recorder = _Recorder(run, world, bool(config.exact), job.closely)
    found = [note.removeprefix("note: ") for note in run.notes if " will differ with " in note]
    recorder.trace.law |= {said: said for said in (note.partition(". --law off")[0] for note in found)}
    trace, count = recorder.trace, min(job.steps, config.epochs * len(run.train))
    state = State()
    recorder.record(state, count)
    run.synchronize()
    recorder.finish()
    measure = at_least(torch.float64, evaluate) if job.wide else evaluate
    metrics = measure(run.evaluated, run.val, world, config.precision, tta=config.tta, synchronized=True)
    trace.metrics = {name: value for name, value in asdict(metrics).items() if value is not None}
    trace.weights_sha256 = weights.digest(run.model)
    return trace


def _widen(loader: TrainLoader | EvalLoader) -> None:
    augment = loader.augment
    loader.augment = lambda *args: augment(*args).double()  # type: ignore[assignment]


class _Recorder:
    """Takes the steps of one rank and fills a trace, which is whole on rank 0."""

    def __init__(self, run: Run, world: World, exact: bool, closely: bool) -> None:
        if missing := [name for name in ("optimizer", "sync", "take") if not hasattr(run.step, name)]:
            message = f"--patch left run.step without {' and '.join(missing)}"
            raise UserError(message, "Give the new step those of the old one, or its own.")
        run.step.optimizer.register_step_pre_hook(self._note_gradients)
        self.run, self.world, self.exact, self.main = run, world, exact, world.rank == 0
        self.trace = Trace(world.size)
        self.trace.batch_norm = any(layer.training for layer in batch_norms(run.model))
        self.parts: list[dict[str, Any]] = []  # this rank's of each step, to be put together with the others'
        self.tracks = Tracks(world.device)
        self.check: Any = getattr(run.step, "check", None)  # a patched step may have none
        self.closely = closely and self.check is not None
        if self.check is not None:
            self.check.report = self._note_law

    def _note_law(self, finding: Finding, first: bool) -> None:
        if first:
            self.trace.law[replace(finding, size=0.0, step=0).message] = finding.message

    def record(self, state: State, count: int) -> None:
        """Take the first `count` steps of the run, over as many epochs as they fill."""
        while True:
            for _, _, loss in steps(self.run, state, self._note_batch):
                assert loss is not None, "nothing is left out"
                self._note_step(state.ledger.digest, loss.total())
                if state.steps == count:
                    return
            state.epochs += 1

    def _note_batch(self, batch: Batch) -> None:
        if self.closely:
            self.check.again = True
        self.tracks.begin()
        self.part: dict[str, Any] = {
            "images": fingerprint(batch.images, batch.labels),
            "count": batch.count,
        }
        self.norm, self.taken = math.nan, False

    def _note_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        self.taken = True
        found = list(gradients(self.run))
        self.tracks.note(iter(found), self.main)
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for _, _, gradient in found]
        self.norm = float(torch.stack(norms).norm()) if norms else 0.0

    def _note_step(self, ledger: bytes, loss: float) -> None:
        trace = self.trace
        with self._averaged():
            held = self.tracks.note(itertools.chain(held_by(self.run), moments(self.run)), self.main)
        self.parts.append(self.part | {"ledger": ledger.hex(), "held": held, "loss": loss})
        if self.main:
            trace.norm.append(self.norm)
            trace.skipped.append(not self.taken)
            trace.lr.append([float(group["lr"]) for group in self.run.step.optimizer.param_groups])

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within, buffers that follow each rank's own share until an evaluation are as that would have them."""
        models = [self.run.model, *([self.run.ema.module] if self.run.ema is not None else [])]
        if self.world.size == 1 or self.exact:
            yield
            return
        with preserved_buffers(module for model in models for module in model.modules()):
            for model in models:
                average_buffers(model, self.world.size)
            yield

    def finish(self) -> None:
        """Put together what all ranks noted, and the state at the end; all call it."""
        trace, tracks = self.trace, self.tracks
        tracks.begin()
        held = tracks.note(held_by(self.run), self.main)
        for name, entry in (tracks.steps[-2] if len(tracks.steps) > 1 else {}).items():
            tracks.steps[-1].setdefault(name, entry)  # the optimizer's, as the last step left it
        everyone = self.world.gather(self.parts)
        for step, parts in enumerate(zip(*everyone, strict=True)):
            first = parts[0]
            trace.ledger.append(first["ledger"])
            trace.images.append(sum(part["images"] for part in parts) & (2**64 - 1))
            trace.loss.append(math.fsum(part["loss"] for part in parts) / first["count"])  # rounds once, whatever N
            for rank, part in enumerate(parts):
                if part["ledger"] != first["ledger"]:
                    trace.diverged.append((step, rank, "ledger"))
                trace.diverged += [(step, rank, name) for name in _unlike(part["held"], first["held"])]
        ends = self.world.gather(held)
        trace.diverged += [(len(trace.loss), r, name) for r, end in enumerate(ends) for name in _unlike(end, ends[0])]
        trace.names = sorted(tracks.kinds, key=lambda name: KINDS.index(tracks.kinds[name]))  # else as they came
        trace.kinds = [tracks.kinds[name] for name in trace.names]
        trace.digests, trace.kept = tracks.table(trace.names)


def _unlike(mine: list[tuple[str, int]], first: list[tuple[str, int]]) -> list[str]:
    """The names of what one rank holds and rank 0 does not, or otherwise: the first of them."""
    theirs = dict(first)
    return [name for name, digest in mine if theirs.get(name) != digest][:1] or (
        [] if len(mine) == len(first) else ["the number of tensors"]
    )


def fingerprint(images: Tensor, labels: Tensor) -> int:
    """A number for a set of labelled images, in any order; those of its parts add up to it, modulo 2**64.

    images: [b, ...] of any type; labels: int64 [b], or soft ones [b, classes].
    """
    if not len(images):
        return 0
    sums = _digests("pixels", images)
    sums += _digests("soft label", labels) if labels.ndim > 1 else labels * (bits(stream(0, "label"), labels) | 1)
    return int(bits(stream(0, "sample"), sums).sum()) & (2**64 - 1)


def _digests(what: str, tensor: Tensor) -> Tensor:
    """int64 [b] of the bits of each row of [b, ...]."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    rows = tensor.flatten(1).contiguous().view(kind).to(torch.int64)
    factors = bits(stream(0, what), torch.arange(rows.shape[1], device=rows.device)) | 1
    return (rows * factors).sum(1)


def held_by(run: Run) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of all parameters, then all buffers, of the model and its moving average.

    By name and as they are now: a model may give a buffer a new tensor in each pass.
    """
    models = {"": run.model} | ({"ema.": run.ema.module} if run.ema is not None else {})
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            yield "weights", prefix + name, whole(parameter.detach())
    for prefix, model in models.items():
        for name, buffer in model.named_buffers():
            yield "buffers", prefix + name, buffer


def gradients(run: Run) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of what the optimizer is about to get."""
    for name, parameter in _owned(run):
        if parameter.grad is not None:
            yield "gradients", f"gradient of {name}", whole(parameter.grad.detach())


def moments(run: Run) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of the optimizer's own state."""
    for name, parameter in _owned(run):
        for key, value in run.step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor | int | float):
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                yield "optimizer", f"{key} of {name}", whole(tensor.detach())


def _owned(run: Run) -> Iterator[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    for g, group in enumerate(run.step.optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"parameter {p} of group {g}"), parameter


class Tracks:
    """Some entries, a digest and the largest magnitude of tensors by name, step after step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kinds: dict[str, str] = {}  # by name, in the order in which they came first
        self.steps: list[dict[str, tuple[int, Tensor, float]]] = []
        self.last: dict[str, Tensor] = {}  # whole tensors, of whatever was noted last

    def begin(self) -> None:
        """The next step's."""
        self.steps.append({})

    def note(self, tensors: Iterator[tuple[str, str, Tensor]], keep: bool) -> list[tuple[str, int]]:
        """Note (kind, name, tensor) of the step that began last; returns names and digests. `keep`: the rest too."""
        found = list(tensors)
        digests = desync.digests([tensor for _, _, tensor in found], self.device).tolist()
        for (kind, name, tensor), digest in zip(found, digests, strict=True):
            if keep:
                self.kinds.setdefault(name, kind)
                flat = _flat(tensor)
                places = torch.linspace(0, max(flat.numel() - 1, 0), SAMPLES).long()
                entries = flat[places] if flat.numel() else flat.new_zeros(SAMPLES)
                scale = flat.abs().max().item() if flat.numel() else 0.0
                self.steps[-1][name] = digest, entries.double(), scale
                self.last[name] = tensor.cpu().contiguous().clone()
        return [(name, digest) for (_, name, _), digest in zip(found, digests, strict=True)]

    def table(self, order: Sequence[str]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Digests [steps][names], and what a trace keeps; the last step noted is the end. 0 where there was nothing."""
        nothing = 0, torch.zeros(SAMPLES, dtype=torch.float64), 0.0
        rows = [[step.get(name, nothing) for name in order] for step in self.steps]
        kept = {f"final/{name}": self.last[name] for name in order}
        for i, name in enumerate(order):
            entries = [row[i][1] for row in rows[:-1]]
            kept[f"samples/{name}"] = torch.stack(entries) if entries else torch.zeros(0, SAMPLES)
        kept["scales"] = torch.tensor([[scale for _, _, scale in row] for row in rows], dtype=torch.float64)
        return [[digest for digest, _, _ in row] for row in rows], kept


def _flat(tensor: Tensor) -> Tensor:
    """All entries, on the host: [n], floats in float64."""
    return as_real(tensor).detach().cpu().reshape(-1).to(torch.float64)
