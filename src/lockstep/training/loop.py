"""The story of a run: resume, epochs, steps, evaluation, saving."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint import weights
from lockstep.config import Config
from lockstep.parallel.batchnorm import SyncBatchNorm, average_buffers
from lockstep.parallel.data_parallel import replica_devices
from lockstep.processes.world import World
from lockstep.training.control import NOTHING
from lockstep.training.evaluation import evaluate
from lockstep.training.session import Session, session
from lockstep.training.state import State
from lockstep.training.window import NonFinite, Window
from lockstep.watch import desync
from lockstep.watch.journal import EvalRecord, StepRecord


@dataclass(frozen=True)
class Outcome:
    """How a run ended: where it got to, and the number of the signal that stopped it (0: it is complete)."""

    state: State
    stop: int


def train(config: Config, world: World, folder: Path) -> Outcome:
    """Train by `config`, going on from the newest checkpoint in `folder`, which exists. All ranks call it together.

    Leaves journal, checkpoints and weights in the folder. SIGTERM, SIGINT, SIGUSR1 and SIGHUP take effect at the next
    step boundary, after a checkpoint.

    Raises:
        UserError: for what the user can put right, naming rank and step.
    """
    with session(config, world, folder) as live:
        if live.config.on_nonfinite == "rollback" and live.state.steps == 0:
            live.checkpoint()  # somewhere to go back to
        while live.state.epochs < config.epochs and not live.stop:
            try:
                train_epoch(live)
                if not live.stop:
                    finish_epoch(live)
            except NonFinite as bad:
                live.roll_back(bad)
        live.settle()
        return Outcome(live.state, live.stop)


def train_epoch(live: Session) -> None:
    """Go on to the end of the epoch, or until the ranks agree to stop.

    Nothing in it waits for the device but log steps, checkpoints and comparisons.
    """
    config, run, state, beat = live.config, live.run, live.state, live.beat
    start = state.steps - state.epochs * len(run.train)
    window = Window(live.world, run, config.execution.log_every)
    compiling = config.model.compile  # the first step may take minutes
    beat.at(state.steps, "loader")
    for batch in run.train.epoch(state.epochs, start):
        beat.at(state.steps, "forward-backward")
        trained = batch.step not in state.skipped
        if trained:
            with beat.pause("compilation") if compiling else nullcontext():
                window.add(run.step(batch), batch)
            compiling = False
            if run.ema is not None:
                run.ema.update_parameters(run.model)
        state.advance(batch.ids, trained)
        ended = state.steps % len(run.train) == 0
        if ended:
            run.step.sync.settle()
        common = ended or state.steps % config.link.sync_every == 0  # else each rank has weights of its own
        agreed = live.control.agree(state.steps, failed=live.failed) if common else NOTHING
        live.raise_if_write_failed(agreed.failed)
        saving = (agreed.checkpoint and not ended) or bool(agreed.stop)  # at an epoch's end the evaluation comes first
        if window.batches and (window.full or ended or saving):
            log(live, window)
        check_every = config.recovery.check_every
        if common and check_every and state.steps % check_every < config.link.sync_every:
            compare(live)
        if saving and live.keeps:
            live.checkpoint()
        if agreed.stop:
            live.stop = agreed.stop
            return
        beat.at(state.steps, "loader")


def log(live: Session, window: Window) -> None:
    """Write the `step` record and move the bar."""
    state = live.state
    lr = window.batches[-1][2]
    numbers = window.read(tolerant=live.config.on_nonfinite == "skip")
    live.note_written()
    live.journal.write(
        StepRecord(kind="step", step=state.steps, epoch=state.epochs, samples=state.samples, lr=lr, **numbers)
    )
    live.bar.update(state.steps, state.epochs + 1, numbers["loss"], lr, numbers["images_per_s"])


def compare(live: Session) -> None:
    """Stop the run where the ranks no longer hold the same weights."""
    live.beat.at(live.state.steps, "comparison of ranks")
    same_buffers = bool(live.config.exact) or any(isinstance(m, SyncBatchNorm) for m in live.run.model.modules())
    desync.check(live.world, live.state.steps, live.run.model, live.run.step.optimizer, buffers=same_buffers)


def finish_epoch(live: Session) -> None:
    """Evaluate on all ranks where it is time, keep the weights, and checkpoint where it is time."""
    config, state = live.config, live.state
    last = state.epochs + 1 == config.epochs
    if last or (state.epochs + 1) % config.execution.eval_every == 0:
        evaluate_and_keep(live)
    state.epochs += 1
    agreed = live.control.agree(state.steps, failed=live.failed, now=True)
    live.raise_if_write_failed(agreed.failed)
    if live.keeps and (agreed.checkpoint or agreed.stop or last):
        live.checkpoint()
    live.stop = 0 if last else agreed.stop


def evaluate_and_keep(live: Session) -> None:
    """Write the `eval` record and the weights, also as the best where they are."""
    config, run, state = live.config, live.run, live.state
    average_buffers(run.model, live.world)
    metrics = evaluate(
        run.evaluated,
        run.val,
        live.world,
        config.precision,
        tick=lambda: live.beat.at(state.steps, "evaluation"),
        tta=config.tta,
        devices=replica_devices(run.step.model),
    )
    live.journal.write(
        EvalRecord(
            kind="eval",
            epoch=state.epochs,
            step=state.steps,
            top1=metrics.top1,
            top5=metrics.top5,
            loss=metrics.loss,
            count=metrics.count,
        )
    )
    live.bar.write(f"epoch {state.epochs + 1}/{config.epochs}: {metrics}")
    best = metrics.top1 > state.best_top1
    if best:
        state.best_top1, state.best_step = metrics.top1, state.steps
    note = {"epoch": str(state.epochs), "step": str(state.steps), "top1": repr(metrics.top1)}
    for name in ("final", "best") if best else ("final",):
        path = live.folder / "weights" / f"{name}.safetensors"
        weights.save(run.evaluated, path, note, here=live.world.rank == 0)
    state.metrics = metrics
