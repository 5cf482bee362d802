"""Runs traced on each rank, through the pieces that `train` uses."""

import hashlib
import itertools
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import weights
from lockstep.commands.verify.switches import FLOAT64, has_batch_norm, switched_off
from lockstep.commands.verify.trace import SAMPLES, Job, Trace, read, write
from lockstep.config.objects import load_object
from lockstep.data.loaders import Batch
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import average_buffers
from lockstep.parallel.sync import GradientSync
from lockstep.processes.world import World
from lockstep.randomness import bits, stream
from lockstep.training.assemble import Run, assemble
from lockstep.training.evaluation import evaluate
from lockstep.training.loop import steps
from lockstep.training.state import State

_ENOUGH = 16  # sample ids that tell two epochs' orders apart
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
    batch_norm = has_batch_norm(run.model)
    state = _state(run)
    if job.start:
        _restore(state, read(Path(job.start)))
    recorder = _Recorder(run, world, state)
    trace = Trace(world.size, len(run.train), run.train.order.samples_per_epoch, list(state), batch_norm=batch_norm)
    trace.parameters = sum(isinstance(tensor, torch.nn.Parameter) for tensor in state.values())
    count = min(job.steps, config.epochs * len(run.train))
    if count:
        with switched_off(run, job.off, job.lr):
            recorder.run(count, _Ticker(job.title, count, world.rank == 0))
        trace.repeats = config.epochs > 1 and _first_ids(run, 0) == _first_ids(run, 1)
    average_buffers(run.model, world)
    recorder.fill(trace)
    trace.weights_sha256 = weights.digest(run.model)
    if job.evaluate:
        trace.metrics = asdict(evaluate(run.evaluated, run.val, world, config.precision, tta=config.tta))
    return trace


def _state(run: Run) -> dict[str, Tensor]:
    """Parameters, then buffers, of the model and of its moving average."""
    models = {"": run.model} | ({"ema.": run.ema.module} if run.ema is not None else {})
    parameters = {f"{p}{name}": t for p, model in models.items() for name, t in model.named_parameters()}
    return parameters | {f"{p}{name}": t for p, model in models.items() for name, t in model.named_buffers()}


@torch.no_grad()
def _restore(state: dict[str, Tensor], trace: Trace) -> None:
    for name, tensor in state.items():
        tensor.copy_(trace.kept[f"final/{name}"])


def _first_ids(run: Run, epoch: int) -> list[int]:
    """The first ids of an epoch, as its loader delivers them."""
    batches = itertools.islice(run.train.epoch(epoch), -(-_ENOUGH // run.train.order.batch_size))
    ids = np.concatenate([batch.ids for batch in batches])
    return ids.tolist() if len(ids) >= _ENOUGH // 2 else [epoch]  # so few could agree by chance


class _Recorder:
    """Takes the steps of one rank and notes what the trace needs."""

    def __init__(self, run: Run, world: World, state: dict[str, Tensor]) -> None:
        self.run_, self.world, self.state = run, world, state
        self.parts: list[dict[str, Any]] = []  # this rank's: ledger, parameters' digest, loss, images, pieces
        self.seen: list[dict[str, Any]] = []  # of all ranks alike, where they are healthy
        self.samples: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.draws = False
        if not isinstance(getattr(run.step, "optimizer", None), torch.optim.Optimizer):
            raise UserError(
                "--patch left run.step without an optimizer, from which gradients and rates are read",
                "Give the new step an attribute `optimizer`: the torch optimizer that it calls.",
            )
        if not hasattr(run.step, "sync"):
            run.step.sync = GradientSync()  # a step of the user's own brings its ranks together itself
        run.step.optimizer.register_step_pre_hook(self._note_norm)
        self.places = {
            name: torch.linspace(0, t.numel() - 1, min(SAMPLES, t.numel())).long() for name, t in state.items()
        }

    def run(self, count: int, ticker: "_Ticker") -> None:
        """Take the first `count` steps of the run, over as many epochs as they fill."""
        state = State()
        while True:
            for _, _, loss in steps(self.run_, state, self._loaded):
                assert loss is not None, "nothing is left out"
                self._note(state.ledger, float(loss))
                ticker.show(state.steps)
                if state.steps == count:
                    return
            average_buffers(self.run_.model, self.world)
            state.epochs += 1

    def _loaded(self, batch: Batch) -> None:
        images = fingerprint(batch.images, batch.labels)
        self.batch = {"images": images, "sizes": batch.sizes, "count": batch.count}
        self.norm, self.drawn = math.nan, _Draws(self.world.device)

    def _note_norm(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        wide = torch.float32 if self.world.device.type == "mps" else torch.float64
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=wide) for gradient in gradients]
        self.norm = float(torch.stack(norms).norm()) if norms else 0.0

    def _note(self, ledger: bytes, loss: float) -> None:
        self.draws |= bool(self.drawn)
        host = {name: t.detach().cpu() for name, t in self.state.items()}
        digests = [_digest(tensor) for tensor in host.values()]
        parameters = [d for d, t in zip(digests, self.state.values(), strict=True) if isinstance(t, torch.nn.Parameter)]
        together = hashlib.sha256("".join(parameters).encode()).hexdigest()
        self.parts.append(self.batch | {"ledger": ledger.hex(), "weights": together, "loss": loss})
        if self.world.rank == 0:
            lr = [float(group["lr"]) for group in self.run_.step.optimizer.param_groups]
            self.seen.append({"norm": self.norm, "lr": lr, "digests": digests})
            wide = [tensor.reshape(-1).to(torch.float64) for tensor in host.values()]
            self.samples.append(torch.cat([t[self.places[name]] for name, t in zip(host, wide, strict=True)]))
            self.scales.append(torch.stack([t.abs().max() if t.numel() else t.sum() for t in wide]))

    def fill(self, trace: Trace) -> None:
        """Put together what all ranks noted; all call it."""
        everyone = self.world.gather(self.parts)
        trace.draws = any(self.world.gather(self.draws))
        if self.world.rank > 0:
            return
        for step, (first, seen) in enumerate(zip(everyone[0], self.seen, strict=True)):
            parts = [rank[step] for rank in everyone]
            trace.ledger.append(first["ledger"])
            trace.images.append(sum(part["images"] for part in parts) & (2**64 - 1))
            trace.loss.append(math.fsum(part["loss"] for part in parts) / first["count"])  # rounds once, whatever N
            trace.norm.append(seen["norm"])
            trace.lr.append(seen["lr"])
            trace.digests.append(seen["digests"])
            trace.shares.append([part["sizes"] for part in parts])
            for rank, part in enumerate(parts):
                trace.strangers += [(step, rank, what) for what in ("ledger", "weights") if part[what] != first[what]]
        trace.kept = {f"final/{name}": t.detach().cpu().contiguous().clone() for name, t in self.state.items()}
        if self.samples:
            trace.kept |= {"samples": torch.stack(self.samples), "scales": torch.stack(self.scales)}


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


def _digest(tensor: Tensor) -> str:
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(octets.data, digest_size=8).hexdigest()


def _generator(device: torch.device) -> torch.Generator | None:
    """The generator that dropout on `device` draws from; None where it can't be asked."""
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    return generators[device.index or 0] if generators else None


class _Draws:
    """Whether random numbers are drawn on a device after this is made, other than before a seeding."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, _generator(device)
        self.before = self.generator.get_state() if self.generator else None

    def __bool__(self) -> bool:
        if self.generator is None or self.before is None:
            return True
        now = self.generator.get_state()
        seeded = torch.Generator(self.device).manual_seed(self.generator.initial_seed()).get_state()
        return not torch.equal(now, self.before) and not torch.equal(now, seeded)


class _Ticker:
    """Progress on stderr: one line that counts on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str, steps: int, enabled: bool) -> None:
        self.title, self.steps, self.enabled = title, steps, enabled
        self.live, self.said = sys.stderr.isatty(), time.monotonic()

    def show(self, taken: int) -> None:
        """Say that `taken` steps are done."""
        if not self.enabled or not (self.live or time.monotonic() - self.said >= _PLAIN_SECONDS):
            return
        self.said = time.monotonic()
        start, end = ("\r", "\n" if taken == self.steps else "") if self.live else ("", "\n")
        print(f"{start}{self.title}: step {taken}/{self.steps}", end=end, file=sys.stderr, flush=True)
