"""The story of a run: resume, epochs, steps, evaluation, saving."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.checkpoint import weights
from lockstep.checkpoint.remote import Mirror
from lockstep.checkpoint.weights import Card
from lockstep.config import Config
from lockstep.data.loaders import Batch
from lockstep.distributed.resize import Resize
from lockstep.distributed.world import World
from lockstep.monitoring import desync
from lockstep.monitoring.journal import EvalRecord, FaultRecord, StepRecord
from lockstep.parallel.batchnorm import SyncBatchNorm
from lockstep.rng.intercept import left_replaced
from lockstep.training.assemble import Run, assemble
from lockstep.training.evaluation import LARGEST_IN_JOURNAL, ClassCounts, evaluate
from lockstep.training.losses import RankLoss
from lockstep.training.pretrained import origin, settled
from lockstep.training.resume import to_assemble
from lockstep.training.session import NonFinite, Session, Window, session
from lockstep.training.state import State, is_over, note_result, out_of_patience


@dataclass(frozen=True)
class Outcome:
    """How a run ended: where it got to, and the number of the signal that stopped it (0: it is complete)."""

    state: State
    stop: int
    seconds: float  # with evaluations, checkpoints and resizes, without the start
    epochs: float  # since the start, which took so long
    resize: Resize | None = None  # the processes that shall go on, where others were asked for


def train(
    config: Config,
    world: World,
    folder: str | Path,
    began: float | None = None,
    mirror: Mirror | None = None,
    resizable: bool = False,
    sources: dict[str, str] | None = None,
) -> Outcome:
    """Train by `config`, going on from the newest checkpoint in `folder`. All ranks call it together.

    Makes the folder, and leaves journal, checkpoints and weights there. SIGTERM, SIGINT and SIGUSR1 take effect at
    the next step boundary, after a checkpoint.
    `began`: from when on --max-time counts, by time.monotonic() (None: from now).
    `mirror`: uploads the folder, on rank 0 of a run in a store.
    `resizable`: a request for another number of processes ends it too (`Outcome.resize`).
    `sources`: digests of the user's own code, by what it is (`run_folder.sources_named`).

    Raises:
        UserError: for what the user can put right, naming rank and step.
    """
    config, folder = settled(config), Path(folder)
    run = assemble(to_assemble(config, world, folder), world)
    with session(config, world, run, folder, began, mirror, resizable, sources) as live:
        if live.config.on_nonfinite == "rollback" and live.state.steps == 0:
            live.checkpoint()  # somewhere to go back to
        start, began_at = live.since = live.before.get("since") or (time.monotonic(), live.state.steps)
        while not is_over(config, live.state) and not live.stop:
            try:
                train_epoch(live)
                if not live.stop:
                    finish_epoch(live)
            except NonFinite as bad:
                live.roll_back(bad)
        live.flush()
        epochs = (live.state.steps - began_at) / len(run.train)
        return Outcome(live.state, live.stop, time.monotonic() - start, epochs, live.resize)


def train_epoch(live: Session) -> None:
    """Go on to the end of the epoch, or until the ranks agree to stop.

    Nothing in it waits for the device but log steps, checkpoints and comparisons.
    """
    run, state, beat = live.run, live.state, live.beat
    window = Window(live.world, run, live.config)
    with ExitStack() as compilation, left_replaced(getattr(run.step, "draws", None)):

        def loaded(batch: Batch) -> None:
            live.note_resize()
            beat.at(state.steps, "forward-backward")
            if live.config.model.compile:
                compilation.enter_context(live.compiling("step", *(shard.size for shard in batch.shards)))

        beat.at(state.steps, "loader")
        for step, samples, loss in steps(run, state, loaded):
            compilation.close()
            if loss is not None:
                window.add(step, samples, loss)
            if live.run.step.left_out:
                live.journal.write(FaultRecord(kind="fault", fault="skip", step=step + 1))
            between_steps(live, window)
            if live.stop:
                return
            beat.at(state.steps, "loader")


def steps(run: Run, state: State, loaded: Callable[[Batch], object]) -> Iterator[tuple[int, int, RankLoss | None]]:
    """Take the epoch's steps from where `state` is on: the one place that does, for train, verify and forecast alike.

    `loaded` is called with each batch before its step. Yields after each step, when `state` has moved on, its number
    from 0, the samples of its global batch and this rank's loss, on the device; None: a rollback left it out.
    The batch itself is not passed on: who held it would keep its memory through the next step.
    """
    per_epoch = len(run.train)
    for batch in run.train.epoch(state.epochs, state.steps - state.epochs * per_epoch):
        loaded(batch)
        loss = None
        if batch.step not in state.skipped:
            loss = run.step.take(batch)
        left_out = loss is None or getattr(run.step, "left_out", False)  # a --patch may put another step there
        if run.ema is not None and not left_out:
            run.ema.update_parameters(run.model)
        state.advance(batch.all_ids, trained=not left_out)
        if state.steps % per_epoch == 0:
            run.synchronize()
        yield batch.step, batch.count, loss


def between_steps(live: Session, window: Window) -> None:
    """What the ranks agree on, log, compare and save at a step boundary; `live.stop` says whether to go on."""
    config, state = live.config, live.state
    ended = state.steps % len(live.run.train) == 0
    agreed = live.control.agree(state.steps, failed=live.failed)
    live.raise_if_write_failed(agreed.failed)
    saving = (agreed.checkpoint and not ended) or bool(agreed.stop)  # at an epoch's end the evaluation comes first
    if window.batches and (window.full or ended or saving or agreed.resize):
        log(live, window)
    check_every = config.recovery.check_every
    if check_every and state.steps % check_every == 0:
        compare(live)
    if saving and live.keeps:
        live.checkpoint()
    live.end_by(agreed.stop)
    if agreed.resize:
        live.hand_over(agreed.resize)


def log(live: Session, window: Window) -> None:
    """Write the `step` record and move the bar."""
    state = live.state
    lr = window.batches[-1][2]
    numbers = window.read(tolerant=live.config.on_nonfinite == "skip")
    live.note_written()
    live.journal.write(
        StepRecord(kind="step", step=state.steps, epoch=state.epochs, samples=state.samples, lr=lr, **numbers)
    )
    speed = numbers["images_per_s"]
    waited = numbers["data_wait_ms"] / 1000 * speed / live.config.batch_size  # of a step's time
    live.bar.update(state.steps, state.epochs + 1, numbers["loss"], lr, speed, waited)


def compare(live: Session) -> None:
    """Stop the run where the ranks no longer hold the same weights."""
    live.beat.at(live.state.steps, "comparison of ranks")
    model = live.run.model
    same = model.modules() if live.config.exact else (m for m in model.modules() if isinstance(m, SyncBatchNorm))
    buffers = {id(buffer) for module in same for buffer in module.buffers(recurse=False)}
    desync.check(live.world, live.state.steps, model, live.run.step.optimizer, lambda buffer: id(buffer) in buffers)


def finish_epoch(live: Session) -> None:
    """Evaluate on all ranks where it is time, keep the weights, and checkpoint where it is time."""
    config, state = live.config, live.state
    live.note_resize()
    if state.epochs + 1 == config.epochs or (state.epochs + 1) % config.execution.eval_every == 0:
        evaluate_and_keep(live)
    state.epochs += 1
    last = is_over(config, state)
    agreed = live.control.agree(state.steps, failed=live.failed, now=True)
    live.raise_if_write_failed(agreed.failed)
    if live.keeps and (agreed.checkpoint or agreed.stop or last):
        live.checkpoint()
    live.end_by(0 if last else agreed.stop)
    if agreed.resize and not last:
        live.hand_over(agreed.resize)


def evaluate_and_keep(live: Session) -> None:
    """Write the `eval` and `classes` records and the weights, also as the best where they are."""
    config, run, state = live.config, live.run, live.state
    counts = ClassCounts(run.val.images, live.world.device, LARGEST_IN_JOURNAL)
    what, share = f"epoch {state.epochs + 1}/{config.epochs}: evaluation", live.world.shard(run.val.chunks)
    count = live.bar.counting(what, len(run.val.images), share.stop - share.start)

    def tick() -> None:
        live.beat.at(state.steps, "evaluation")
        count()

    with live.compiling("evaluation"):
        metrics = evaluate(
            run.evaluated,
            run.val,
            live.world,
            config.precision,
            tick=tick,
            tta=config.tta,
            synchronized=True,
            observe=counts.add,
        )
    scores = counts.scores(run.val.images.classes, live.world)
    found = EvalRecord(kind="eval", epoch=state.epochs, step=state.steps, **metrics.to_dict(), **scores.means())
    live.journal.write(found)
    live.journal.write(scores.record(state.epochs, state.steps))
    classes = len(run.val.images.classes)
    live.bar.write(f"epoch {state.epochs + 1}/{config.epochs}: {metrics.described(classes)}")
    if (guessing := math.log(classes)) * 2 < metrics.loss and state.metrics and state.metrics.loss < metrics.loss:
        live.bar.write(
            f"note: the loss runs away: guessing would have {guessing:.2f}. Lower --lr (now {config.lr:g}), or raise "
            f"--warmup-epochs (now {config.optim.warmup_epochs:g})"
        )
    state.metrics = metrics
    best = note_result(config.selection, state, found)
    if out_of_patience(config, state) and state.epochs + 1 < config.epochs:
        live.note_end("patience", state.epochs)
    card = replace(Card.of(config, run.val.images, origin(config)), thresholds=tuple(scores.thresholds or ()))
    note = {"epoch": str(state.epochs), "step": str(state.steps), "top1": repr(metrics.top1)} | card.to_metadata()
    for name in ("final", "best") if best else ("final",):
        weights.save(run.evaluated, live.folder / "weights" / f"{name}.safetensors", note, here=live.world.rank == 0)
