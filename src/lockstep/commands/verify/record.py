"""Runs traced on each rank, through the pieces that `train` uses."""

import hashlib
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.checkpoint import weights
from lockstep.checkpoint.card import Card
from lockstep.commands.verify import probes
from lockstep.commands.verify.causes import FLOAT64
from lockstep.commands.verify.switches import switched_off
from lockstep.commands.verify.trace import KINDS, Job, Trace, read, write
from lockstep.config.objects import load_object
from lockstep.data.loaders import Batch
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import batch_norms
from lockstep.parallel.modules import average_buffers, preserved
from lockstep.parallel.sync import GradientSync
from lockstep.processes.temporary import temporary_folder
from lockstep.processes.world import World
from lockstep.training.assemble import Run, assemble
from lockstep.training.evaluation import evaluate
from lockstep.training.loop import save_weights, steps
from lockstep.training.pretrained import origin
from lockstep.training.state import State

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
            for _, name, tensor in probes.state(run):
                tensor.copy_(kept[f"final/{name}"])
    recorder = _Recorder(run, world, exact=bool(config.exact))
    trace, count = recorder.trace, min(job.steps, config.epochs * len(run.train))
    state = State()
    if count:
        with switched_off(run, job.off, job.lr):
            recorder.record(state, count, _Ticker(job.title, count, world.rank == 0))
        trace.repeats = config.epochs > 1 and _first_ids(run, 0) == _first_ids(run, 1)
    run.synchronize()
    recorder.finish()
    if job.evaluate:
        state.metrics = evaluate(run.evaluated, run.val, world, config.precision, tta=config.tta, synchronized=True)
        trace.metrics = asdict(state.metrics)
        trace.file_sha256 = _file_sha256(run, state, Card.of(config, run.val.images, origin(config)), world)
    trace.weights_sha256 = weights.digest(run.model)
    return trace


def _file_sha256(run: Run, state: State, card: Card, world: World) -> str:
    """Of the file that `train` leaves, where rank 0 writes it here."""
    with temporary_folder("verify-") as folder:
        path = Path(folder, "final.safetensors")
        save_weights(run, state, card, path, here=world.rank == 0)
        return hashlib.sha256(path.read_bytes()).hexdigest() if world.rank == 0 else ""


def _first_ids(run: Run, epoch: int) -> list[int]:
    """The first ids of an epoch, as its loader delivers them."""
    batches = itertools.islice(run.train.epoch(epoch), -(-_ENOUGH // run.train.order.batch_size))
    ids = np.concatenate([batch.ids for batch in batches])
    return ids.tolist() if len(ids) >= _ENOUGH // 2 else [epoch]  # so few could agree by chance


class _OwnSync(GradientSync):
    """For a step of the user's own, which brings its ranks' gradients together itself."""

    def __init__(self, run: Run, world: World) -> None:
        self.run, self.world = run, world

    def synchronize(self) -> None:
        """Average the buffers, as every strategy does before it evaluates or saves."""
        average_buffers(self.run.model, self.world.size)


class _Recorder:
    """Takes the steps of one rank and fills a trace, which is whole on rank 0."""

    def __init__(self, run: Run, world: World, exact: bool) -> None:
        if not isinstance(getattr(run.step, "optimizer", None), torch.optim.Optimizer):
            raise UserError(
                "--patch left run.step without an optimizer, from which gradients and rates are read",
                "Give the new step an attribute `optimizer`: the torch optimizer that it calls.",
            )
        if not hasattr(run.step, "sync"):
            run.step.sync = _OwnSync(run, world)
        run.step.optimizer.register_step_pre_hook(self._note_gradients)
        self.run, self.world, self.main = run, world, world.rank == 0
        self.trace = Trace(world.size, len(run.train), run.train.order.samples_per_epoch)
        self.trace.exact = exact
        self.trace.batch_norm = any(layer.training for layer in batch_norms(run.model))
        self.parts: list[dict[str, Any]] = []  # this rank's of each step, to be put together with the others'
        self.tracks = probes.Tracks(world.device)
        self.watch = probes.Watch() if exact else None
        if self.watch is not None:
            run.model.register_forward_hook(self.watch)

    def record(self, state: State, count: int, ticker: "_Ticker") -> None:
        """Take the first `count` steps of the run, over as many epochs as they fill."""
        while True:
            for _, _, loss in steps(self.run, state, self._note_batch):
                assert loss is not None, "nothing is left out"
                self._note_step(state.ledger.digest, float(loss))
                ticker.update(state.steps)
                if state.steps == count:
                    return
            state.epochs += 1

    def _note_batch(self, batch: Batch) -> None:
        self.tracks.begin()
        self.part: dict[str, Any] = {
            "images": probes.fingerprint(batch.images, batch.labels),
            "rows": [(piece.rows.start, piece.rows.stop) for piece in batch.pieces],
            "count": batch.count,
        }
        self.norm, self.taken = math.nan, False

    def _note_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        self.taken = True
        wide = torch.float32 if self.world.device.type == "mps" else torch.float64
        found = list(probes.gradients(self.run))
        self.tracks.note(iter(found), self.main)
        norms = [torch.linalg.vector_norm(gradient, dtype=wide) for _, _, gradient in found]
        self.norm = float(torch.stack(norms).norm()) if norms else 0.0

    def _note_step(self, ledger: bytes, loss: float) -> None:
        trace = self.trace
        with self._averaged():
            held = self.tracks.note(itertools.chain(probes.state(self.run), probes.moments(self.run)), self.main)
        outputs = self.watch.taken() if self.watch else 0
        self.parts.append(self.part | {"ledger": ledger.hex(), "held": held, "loss": loss, "outputs": outputs})
        if self.main:
            trace.norm.append(self.norm)
            trace.skipped.append(not self.taken)
            trace.lr.append([float(group["lr"]) for group in self.run.step.optimizer.param_groups])

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within, buffers that follow each rank's own share until an evaluation are as that would have them."""
        models = [self.run.model, *([self.run.ema.module] if self.run.ema is not None else [])]
        if self.world.size == 1 or self.trace.exact:
            yield
            return
        with preserved(module for model in models for module in model.modules()):
            for model in models:
                average_buffers(model, self.world.size)
            yield

    def finish(self) -> None:
        """Put together what all ranks noted, and the state at the end; all call it."""
        trace, tracks = self.trace, self.tracks
        tracks.begin()
        held = tracks.note(probes.state(self.run), self.main)
        for name, entry in (tracks.steps[-2] if len(tracks.steps) > 1 else {}).items():
            tracks.steps[-1].setdefault(name, entry)  # the optimizer's, as the last step left it
        everyone = self.world.gather(self.parts)
        for step, parts in enumerate(zip(*everyone, strict=True)):
            first = parts[0]
            trace.ledger.append(first["ledger"])
            trace.images.append(sum(part["images"] for part in parts) & (2**64 - 1))
            trace.outputs.append(sum(part["outputs"] for part in parts) & (2**64 - 1))
            trace.loss.append(math.fsum(part["loss"] for part in parts) / first["count"])  # rounds once, whatever N
            trace.shares.append([[stop - start for start, stop in part["rows"]] for part in parts])
            if not _covers([rows for part in parts for rows in part["rows"]], first["count"]):
                trace.uncovered.append(step)
            for rank, part in enumerate(parts):
                if part["ledger"] != first["ledger"]:
                    trace.diverged.append((step, rank, "ledger"))
                trace.diverged += [(step, rank, name) for name in _unlike(part["held"], first["held"])]
        ends = self.world.gather(held)
        trace.diverged += [(len(trace.loss), r, name) for r, end in enumerate(ends) for name in _unlike(end, ends[0])]
        trace.names = sorted(tracks.kinds, key=lambda name: KINDS.index(tracks.kinds[name]))  # else as they came
        trace.kinds = [tracks.kinds[name] for name in trace.names]
        trace.digests, trace.kept = tracks.table(trace.names)


def _covers(rows: list[tuple[int, int]], count: int) -> bool:
    """True where the pieces [start, stop) of all ranks take each of `count` samples once."""
    ends = [0]
    for start, stop in sorted(piece for piece in rows if piece[0] != piece[1]):
        if start != ends[-1]:
            return False
        ends.append(stop)
    return ends[-1] == count


def _unlike(mine: list[tuple[str, int]], first: list[tuple[str, int]]) -> list[str]:
    """The names of what one rank holds and rank 0 does not, or otherwise: the first of them."""
    theirs = dict(first)
    return [name for name, digest in mine if theirs.get(name) != digest][:1] or (
        [] if len(mine) == len(first) else ["the number of tensors"]
    )


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
