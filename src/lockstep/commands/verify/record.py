"""Runs traced on each rank, through the pieces that `train` uses."""

import itertools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import weights
from lockstep.commands.verify.causes import FLOAT64
from lockstep.commands.verify.switches import switched_off
from lockstep.commands.verify.trace import SAMPLES, Job, Trace, read, write
from lockstep.config.objects import load_object
from lockstep.data.loaders import Batch
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import batch_norms
from lockstep.parallel.modules import average_buffers
from lockstep.parallel.sync import GradientSync
from lockstep.processes.world import World
from lockstep.randomness import bits, stream
from lockstep.training.assemble import Run, assemble
from lockstep.training.evaluation import evaluate
from lockstep.training.loop import steps
from lockstep.training.state import State
from lockstep.watch import desync

_ENOUGH = 16  # sample ids by which two epochs' orders are compared
_PLAIN_SECONDS = 10.0  # between two lines of progress where there is no terminal


def trace_all(world: World, jobs: Iterable[Job]) -> None:
    """Run the jobs one after the other on this process, as one of the world's."""
    for job in jobs:
        trace = _trace(world, job)
        if world.rank == 0:
            write(trace, Path(job.folder))
        world.barrier()


def _trace(world: World, job: Job) -> Trace:
    config = job.config
    run = assemble(config, world, torch.float64 if FLOAT64 in job.off else None)
    if job.patch:
        load_object(job.patch, "patch")(run, world, config)
    if job.start:
        kept = read(Path(job.start)).kept
        with torch.no_grad():
            for name, tensor in _state(run).items():
                tensor.copy_(kept[f"final/{name}"])
    recorder = _Recorder(run, world)
    trace, count = recorder.trace, min(job.steps, config.epochs * len(run.train))
    if count:
        with switched_off(run, job.off, job.lr):
            recorder.record(count, _Ticker(job.title, count, world.rank == 0))
        trace.repeats = config.epochs > 1 and _first_ids(run, 0) == _first_ids(run, 1)
    average_buffers(run.model, world.size)
    recorder.finish()
    trace.weights_sha256 = weights.digest(run.model)
    if job.evaluate:
        trace.metrics = asdict(evaluate(run.evaluated, run.val, world, config.precision, tta=config.tta))
    return trace


def _state(run: Run) -> dict[str, Tensor]:
    """Parameters, then buffers, of the model and of its moving average, as they are now: a model may replace them."""
    models = {"": run.model} | ({"ema.": run.ema.module} if run.ema is not None else {})
    parameters = {f"{p}{name}": t for p, model in models.items() for name, t in model.named_parameters()}
    return parameters | {f"{p}{name}": t for p, model in models.items() for name, t in model.named_buffers()}


def _first_ids(run: Run, epoch: int) -> list[int]:
    """The first ids of an epoch, as its loader delivers them."""
    batches = itertools.islice(run.train.epoch(epoch), -(-_ENOUGH // run.train.order.batch_size))
    ids = np.concatenate([batch.ids for batch in batches])
    return ids.tolist() if len(ids) >= _ENOUGH // 2 else [epoch]  # so few could agree by chance


class _Recorder:
    """Takes the steps of one rank and fills a trace, which is whole on rank 0."""

    def __init__(self, run: Run, world: World) -> None:
        if not isinstance(getattr(run.step, "optimizer", None), torch.optim.Optimizer):
            raise UserError(
                "--patch left run.step without an optimizer, from which gradients and rates are read",
                "Give the new step an attribute `optimizer`: the torch optimizer that it calls.",
            )
        if not hasattr(run.step, "sync"):
            run.step.sync = GradientSync()  # a step of the user's own brings its ranks together itself
        run.step.optimizer.register_step_pre_hook(self._note_norm)
        self.run, self.world, state = run, world, _state(run)
        self.trace = Trace(world.size, len(run.train), run.train.order.samples_per_epoch, list(state))
        self.trace.parameters = sum(isinstance(tensor, torch.nn.Parameter) for tensor in state.values())
        self.trace.batch_norm = any(layer.training for layer in batch_norms(run.model))
        self.parts: list[dict[str, Any]] = []  # this rank's of each step, to be put together with the others'
        self.samples: list[list[Tensor]] = []
        self.scales: list[Tensor] = []
        self.places = [torch.linspace(0, t.numel() - 1, min(SAMPLES, t.numel())).long() for t in state.values()]

    def record(self, count: int, ticker: "_Ticker") -> None:
        """Take the first `count` steps of the run, over as many epochs as they fill."""
        state = State()
        while True:
            for _, _, loss in steps(self.run, state, self._note_batch):
                assert loss is not None, "nothing is left out"
                self._note_step(state.ledger, float(loss))
                ticker.update(state.steps)
                if state.steps == count:
                    return
            average_buffers(self.run.model, self.world.size)
            state.epochs += 1

    def _note_batch(self, batch: Batch) -> None:
        images = fingerprint(batch.images, batch.labels)
        self.batch = {"images": images, "sizes": [piece.size for piece in batch.pieces], "count": batch.count}
        self.norm, self.draws = math.nan, _Draws(self.world.device)

    def _note_norm(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        wide = torch.float32 if self.world.device.type == "mps" else torch.float64
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=wide) for gradient in gradients]
        self.norm = float(torch.stack(norms).norm()) if norms else 0.0

    def _note_step(self, ledger: bytes, loss: float) -> None:
        draws, trace = bool(self.draws), self.trace
        state = list(_state(self.run).values())
        digests = desync.digests(state, self.world.device).tolist()
        parameters = digests[: trace.parameters]
        self.parts.append(self.batch | {"ledger": ledger.hex(), "weights": parameters, "loss": loss, "draws": draws})
        if self.world.rank == 0:
            trace.norm.append(self.norm)
            trace.lr.append([float(group["lr"]) for group in self.run.step.optimizer.param_groups])
            trace.digests.append(digests)
            wide = [tensor.detach().cpu().reshape(-1).to(torch.float64) for tensor in state]
            self.samples.append([t[places] for t, places in zip(wide, self.places, strict=True)])
            self.scales.append(_scales(wide))

    def finish(self) -> None:
        """Put together what all ranks noted; all call it."""
        trace, everyone = self.trace, self.world.gather(self.parts)
        for step, parts in enumerate(zip(*everyone, strict=True)):
            first = parts[0]
            trace.ledger.append(first["ledger"])
            trace.images.append(sum(part["images"] for part in parts) & (2**64 - 1))
            trace.loss.append(math.fsum(part["loss"] for part in parts) / first["count"])  # rounds once, whatever N
            trace.shares.append([part["sizes"] for part in parts])
            trace.draws |= any(part["draws"] for part in parts)
            for rank, part in enumerate(parts):
                trace.diverged += [(step, rank, what) for what in ("ledger", "weights") if part[what] != first[what]]
        state = _state(self.run)
        trace.digests.append(desync.digests(list(state.values()), self.world.device).tolist())
        final = {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}
        trace.kept = {f"final/{name}": tensor for name, tensor in final.items()}
        for name, entries in zip(trace.names, zip(*self.samples, strict=True), strict=False):
            trace.kept[f"samples/{name}"] = torch.stack(entries)
        trace.kept["scales"] = torch.stack([*self.scales, _scales([t.double() for t in final.values()])])


def fingerprint(images: Tensor, labels: Tensor) -> int:
    """A number for a set of labelled images, in any order; those of its parts add up to it, modulo 2**64.

    images: [b, ...] of any type; labels: int64 [b].
    """
    if not len(images):
        return 0
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[images.element_size()]
    rows = images.flatten(1).contiguous().view(kind).to(torch.int64)
    factors = bits(stream(0, "pixels"), torch.arange(rows.shape[1], device=rows.device)) | 1
    sums = (rows * factors).sum(1) + labels * (bits(stream(0, "label"), labels) | 1)
    return int(bits(stream(0, "sample"), sums).sum()) & (2**64 - 1)


def _scales(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor: float64 [tensors]."""
    return torch.stack([t.abs().max() if t.numel() else t.sum() for t in tensors])


class _Draws:
    """Whether random numbers are drawn on a device after this is made, other than before a seeding."""

    def __init__(self, device: torch.device) -> None:
        generators: Any = [torch.default_generator]
        if device.type != "cpu":
            generators = getattr(torch.get_device_module(device), "default_generators", None)
        self.device = device
        self.generator: torch.Generator | None = generators[device.index or 0] if generators else None
        self.before = self.generator.get_state() if self.generator else None

    def __bool__(self) -> bool:
        if self.generator is None or self.before is None:  # it can't be asked
            return True
        now = self.generator.get_state()
        seeded = torch.Generator(self.device).manual_seed(self.generator.initial_seed()).get_state()
        return not torch.equal(now, self.before) and not torch.equal(now, seeded)


class _Ticker:
    """Progress on stderr: one line that counts on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str, steps: int, enabled: bool) -> None:
        self.title, self.steps, self.enabled = title, steps, enabled
        self.live, self.printed = sys.stderr.isatty(), time.monotonic()

    def update(self, taken: int) -> None:
        """Print how many steps are done."""
        if not self.enabled or not (self.live or time.monotonic() - self.printed >= _PLAIN_SECONDS):
            return
        self.printed = time.monotonic()
        start, end = ("\r", "\n" if taken == self.steps else "") if self.live else ("", "\n")
        print(f"{start}{self.title}: step {taken}/{self.steps}", end=end, file=sys.stderr, flush=True)
