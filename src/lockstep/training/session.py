"""A run under way on one rank, from where it resumes to its journal's `end` record: its parts, and who watches it."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.checkpoint import weights
from lockstep.checkpoint.carried import lost_line
from lockstep.checkpoint.remote import Mirror
from lockstep.checkpoint.restore import Loaded, newest
from lockstep.checkpoint.store import abandon
from lockstep.checkpoint.writer import Writer, contribute, snapshot
from lockstep.config import Config
from lockstep.config.objects import exit_error, is_of_a_signal
from lockstep.data.contents import duplicates
from lockstep.distributed import signals
from lockstep.distributed.devices import peak_gib
from lockstep.distributed.files import remove_half_written, write_json, writing
from lockstep.distributed.output import take_broken
from lockstep.distributed.resize import REQUEST, Resize, answer, read_request
from lockstep.distributed.world import World
from lockstep.errors import PeerError, UserError
from lockstep.monitoring.heartbeat import Heartbeat, run_store
from lockstep.monitoring.journal import (
    EndRecord,
    FaultRecord,
    Journal,
    LawRecord,
    Means,
    ResizeRecord,
    StopRecord,
    append,
    damage,
)
from lockstep.monitoring.loggers import open_loggers
from lockstep.monitoring.progress import ProgressBar
from lockstep.parallel.determinism import rounding
from lockstep.parallel.fsdp import is_sharded, local
from lockstep.parallel.module_state import all_finite
from lockstep.training import optimizers, pretrained, resize, resume
from lockstep.training.assemble import Run, refuse_single_values
from lockstep.training.control import OUT_OF_TIME, RESIZED, Control, stop_requests
from lockstep.training.losses import RankLoss
from lockstep.training.outcomes import Finding
from lockstep.training.state import State, is_over
from lockstep.training.summary import run_record, summary


class NonFinite(UserError):
    """A loss or a weight is no longer finite. All ranks raise it together."""

    def __init__(self, step: int, message: str, config: Config) -> None:
        lower = {"fp16": ["use --precision bf16 or fp32"], "bf16": ["use --precision fp32"]}.get(config.precision, [])
        ways = ["lower --lr", "add --warmup-epochs or --clip-norm", *lower]
        if config.on_nonfinite != "rollback":
            ways.append("leave the batch out with --on-nonfinite rollback")
        super().__init__(message, f"{', '.join(ways[:-1]).capitalize()}, or {ways[-1]}.")
        self.step = step


class Window:
    """The steps since the last log step; their losses stay on the device until somebody reads them."""

    def __init__(self, world: World, run: Run, config: Config) -> None:
        self.world, self.run, self.config = world, run, config
        self.restart()

    def restart(self) -> None:
        """Begin the next window here, with this one unread."""
        self.batches: list[tuple[int, int, float]] = []  # step, samples, learning rate
        self.losses: list[RankLoss] = []
        self.waited_ms, self.began = self.run.train.wait_ms, time.perf_counter()

    @property
    def full(self) -> bool:
        """True on a log step."""
        return len(self.batches) == self.config.execution.log_every

    def add(self, step: int, samples: int, loss: RankLoss) -> None:
        """Note one step, the samples of its global batch, and this rank's loss."""
        self.losses.append(loss)
        self.batches.append((step, samples, self.run.step.optimizer.param_groups[0]["lr"]))

    def _by_step(self) -> list[list[float]]:
        """[steps + 1][ranks]: each rank's summed loss in each step, and its wait for others in ms, -1 if unknown."""
        waited = self.run.step.sync.waited_ms()
        waited = -1.0 if waited is None else waited
        means = [mean for loss in self.losses for mean in loss.means]
        numbers = iter(torch.stack(means).tolist() if means else ())  # one wait for the device
        mine = [sum(next(numbers) * samples for samples in loss.samples) for loss in self.losses]
        if self.world.size == 1:
            return [[number] for number in (*mine, waited)]
        rows = torch.tensor([*mine, waited], dtype=torch.float64, device=self.world.device)
        by_step: list[list[float]] = self.world.rows(rows).t().tolist()
        return by_step

    def read(self, tolerant: bool = False) -> Means:
        """Mean loss, images/s and waits since the last call: waits for the device, and one small all-reduce.

        `data_wait_ms` is rank 0's mean per step, `comm_wait_ms` that of the rank that waited longest (None: unknown).

        Raises:
            NonFinite: where a loss is not finite, naming step, ranks and learning rate, unless `tolerant`.
        """
        count = len(self.batches)
        *by_step, waits = self._by_step()
        for (step, _, lr), losses in zip(self.batches, by_step, strict=True):
            ranks = [rank for rank, loss in enumerate(losses) if loss - loss != 0]
            if ranks and not tolerant:
                raise NonFinite(
                    step,
                    f"the loss became non-finite at step {step + 1} on rank(s) {', '.join(map(str, ranks))}, "
                    f"learning rate {lr:.3g}",
                    self.config,
                )
        samples = sum(n for _, n, _ in self.batches)
        seconds = time.perf_counter() - self.began
        numbers = Means(
            loss=sum(map(sum, by_step)) / samples,
            images_per_s=round(samples / seconds, 1),
            data_wait_ms=round((self.run.train.wait_ms - self.waited_ms) / count, 3),
            comm_wait_ms=round(max(waits), 3) if min(waits) >= 0 else None,
        )
        self.restart()
        return numbers


_ROLLBACKS = 10  # more than this is not a bad batch but a bad experiment


@dataclass
class Session:
    """What the loop works with. Every rank has one; only rank 0's journal and writer touch the disk."""

    config: Config
    world: World
    run: Run
    folder: Path
    state: State
    journal: Journal
    bar: ProgressBar
    control: Control
    beat: Heartbeat
    writer: Writer | None  # on rank 0
    mirror: Mirror | None = None  # likewise, of a run in a store
    rollbacks: int = 0
    peak_memory_gib: list[float] = field(default_factory=list)  # by rank, once it has settled
    digest: str = ""  # of the weights: of sharded ones then, of others at the end
    stop: int = 0  # the signal by which the ranks agreed to stop, or OUT_OF_TIME
    said_lost: bool = False  # what no checkpoint holds
    compiled: set[tuple[str | int, ...]] = field(default_factory=set)  # the kinds and shapes of work seen so far
    resize: Resize | None = None  # who goes on, where the ranks agreed on that
    before: dict[str, Any] = field(default_factory=dict)  # what processes before these handed over
    duplicates: list[str] = field(default_factory=list)  # lines about pictures that are trained and validated on
    began: float = field(default_factory=time.monotonic)
    sources: dict[str, str] = field(default_factory=dict)  # digests of the user's own code as the run began
    since: tuple[float, int] = (0.0, 0)  # when and at which step training began, be it in processes before these

    @property
    def keeps(self) -> bool:
        """True where the run takes checkpoints at all."""
        return self.control.every.count > 0

    @property
    def failed(self) -> bool:
        """True on the rank whose last write failed, or whose run was taken over."""
        return any(each is not None and each.failed for each in (self.writer, self.mirror))

    def compiling(self, *work: str | int) -> AbstractContextManager[None]:
        """Around work of a kind and of shapes: with --compile the first of them may be compiled, for minutes."""
        if not self.config.model.compile or work in self.compiled:
            return nullcontext()
        self.compiled.add(work)
        self.bar.doing(f"compiling: {work[0]}")
        return self.beat.long_phase("compilation")

    def checkpoint(self) -> None:
        """Save all that a resume needs; every rank calls it at the same step. Training waits for the copy alone."""
        self._prepare_to_save("checkpoint")
        if self.writer is not None:
            step, best = self.run.step, self.state.best_step
            ema, saved = self.run.ema, self._saved()
            self.writer.save(self.state.steps, self.run.model, step.optimizer, step.scaler, ema, saved, best)
        else:
            self._contribute()
        self.control.saved()
        self.note_written()

    def hand_over(self, nproc: int) -> None:
        """Write all that a resume needs for so many other processes, and stop; every rank calls it at the same step.

        Where it can't be written, these go on.
        """
        self._prepare_to_save("resize")
        main, step, said = self.world.rank == 0, self.run.step, ("", "")
        if main:
            now = time.monotonic()  # the same clock in all processes of a machine
            carried = {
                "before": self.world.size, "stopped": now, "seconds": now - self.began, "since": self.since,
                "duplicates": self.duplicates,
            }  # fmt: skip
            saved, model, ema = self._saved() | {"resize": carried}, self.run.model, self.run.ema
            taken = snapshot(self.state.steps, model, step.optimizer, step.scaler, ema, saved)
            try:
                said = (str(resize.keep(taken)), "")
            except UserError as error:
                said = ("", error.message)
        else:
            self._contribute()
        place, why = self.world.gather(said)[0]
        if place:
            self.stop, self.resize = RESIZED, Resize(nproc, place)
            signals.hold_stops()
            if self.control.request.signal:  # since the ranks agreed: for those who go on
                signals.is_held(self.control.request.signal)
        elif main:
            self.bar.write(f"stays on {self.world.size} process(es): {why}")
            if (request := read_request(self.folder)) is not None:
                answer(self.folder, request, why)

    def note_resize(self) -> None:
        """Where these processes took the place of others: write the `resize` record when the next batch is there."""
        before, self.before = self.before, {}
        if not before or self.world.rank > 0:
            return
        seconds, size, step = time.monotonic() - before["stopped"], self.world.size, self.state.steps
        self.journal.write(
            ResizeRecord(
                kind="resize", step=step, before=before["before"], processes=size, seconds=round(seconds, 3)
            )
        )  # fmt: skip
        if (request := read_request(self.folder)) is not None and request.nproc == size:
            (self.folder / REQUEST).unlink(missing_ok=True)
        self.bar.write(f"{before['before']} -> {size} processes at step {step}, {seconds:.1f} s")

    def _prepare_to_save(self, what: str) -> None:
        self.beat.at(self.state.steps, what)
        self.run.synchronize()
        self._require_finite()

    def _saved(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors."""
        hidden, lost = resume.carried(self.run)
        if lost and not self.said_lost:
            self.said_lost = True
            self.bar.write(f"note: {lost_line(lost)}")
        return {
            "hidden": hidden,
            "lost": lost,
            "host_draws": self.run.step.host_generators.used,
            "progress": self.state.to_dict(),
            "config": self.config.to_dict(),
            "data": self.run.train.images.fingerprint,
            "rounding": rounding(self.world.device),
            "sources": self.sources,
        }

    def _contribute(self) -> None:
        """This rank's part of what rank 0 saves."""
        if is_sharded(self.run.model):
            contribute(self.run.model, self.run.step.optimizer, self.run.ema)

    def note_written(self) -> None:
        """Put the checkpoints that have come to the disk into the journal, and that output was turned off."""
        if self.world.rank == 0 and (cause := take_broken()):
            self.journal.write(FaultRecord(kind="fault", fault="output", step=self.state.steps, cause=cause))
        if self.writer is not None:
            for saved in self.writer.finished():
                self.journal.write(saved)
        for cause in self.mirror.notes() if self.mirror is not None else ():
            self.journal.write(FaultRecord(kind="fault", fault="upload", step=self.state.steps, cause=cause))
            self.bar.write(f"note: {cause}")

    def note_law(self, finding: Finding, first: bool) -> None:
        """Write the `law` record, and say the first."""
        self.journal.write(
            LawRecord(
                kind="law", step=finding.step + 1, what=finding.what, place=finding.place, difference=finding.size,
                message=finding.message,
            )
        )  # fmt: skip
        if first:
            self.bar.write(finding.note)

    def end_by(self, stop: int) -> None:
        """Go on (0), or leave the loop by a signal or OUT_OF_TIME, on which the ranks agreed."""
        self.stop = stop
        if stop == OUT_OF_TIME:
            self.note_end("max-time", self.state.epochs)

    def note_end(self, reason: Literal["patience", "max-time"], epoch: int) -> None:
        """Write the `stop` record, and say it."""
        state, choose = self.state, self.config.selection
        self.journal.write(
            StopRecord(
                kind="stop", reason=reason, epoch=epoch, step=state.steps, best_step=state.best_step,
                metric=choose.keep_best, best=state.best,
            )
        )  # fmt: skip
        if reason == "patience":
            self.bar.write(
                f"{state.waited} evaluation(s) without a better {choose.keep_best}: the run ends here; the best was at "
                f"step {state.best_step}"
            )

    def raise_if_write_failed(self, agreed: bool) -> None:
        """Stop all ranks where they have agreed that a checkpoint could not be written; older ones are intact."""
        if not agreed:
            return
        for each in (self.writer, self.mirror):
            if each is not None and (error := each.failure()) is not None:
                raise error
        raise PeerError("rank 0 could not write a checkpoint")

    def flush(self) -> None:
        """Wait until the last checkpoint is on the disk, on all ranks."""
        with self.beat.long_phase("waiting for the checkpoint"):
            if self.writer is not None:
                self.writer.close()
            self.note_written()
            if is_sharded(self.run.model):  # now, and not after an error, when the others may be gone
                self.digest = weights.digest(self.run.model)
            self.peak_memory_gib = self.world.gather(round(peak_gib(self.world.device), 3))

    def roll_back(self, bad: NonFinite) -> None:
        """Go back to the newest checkpoint, with the batch of the bad step left out from now on."""
        self.rollbacks += 1
        if self.config.on_nonfinite != "rollback" or self.rollbacks > _ROLLBACKS:
            raise bad
        self.flush()
        checkpoints = self.folder / "checkpoints"
        found = newest(checkpoints, resume.digests(self.folder)) if self.world.rank == 0 else None
        theirs = self.world.gather(found and found.to_dict())[0]
        if theirs is None:
            raise bad
        loaded = Loaded.from_dict(theirs)
        skipped = sorted({*self.state.skipped, bad.step})
        self.state = resume.load(self.run, loaded)
        self.state.skipped = skipped
        if self.world.rank == 0:
            abandon(checkpoints, loaded.step)
        self.journal.write(
            FaultRecord(
                kind="fault", fault="rollback", step=bad.step + 1, back_to=loaded.step,
                skipped=[step + 1 for step in skipped], cause=bad.message,
            )
        )  # fmt: skip
        self.bar.write(f"{bad.message}: back to step {loaded.step}, leaving out the batch of step {bad.step + 1}")

    def _require_finite(self) -> None:
        """A checkpoint of NaN would be the newest good one: refuse to take it. Waits for the device, once."""
        parameters = [local(p.detach()) for p in self.run.model.parameters() if p.is_floating_point()]
        broken = not all_finite(parameters, self.world.device)
        if any(self.world.gather(broken)) if is_sharded(self.run.model) else broken:
            step = self.state.steps - 1
            raise NonFinite(step, f"the weights became non-finite at step {step + 1}", self.config)


_LAST_WRITE_S = 3.0  # less than what a launcher leaves a failing process


@contextmanager
def session(
    config: Config,
    world: World,
    run: Run,
    folder: Path,
    began: float | None = None,
    mirror: Mirror | None = None,
    resizable: bool = False,
    sources: dict[str, str] | None = None,
) -> Iterator[Session]:
    """Resume a run where it can go on, and have it watched; leaves the journal's `end` record behind.

    `resizable`: another number of processes may be asked for (see `Session.resize`).
    `sources`: digests of the user's own code, which checkpoints keep.
    """
    main, recovery, execution = world.rank == 0, config.recovery, config.execution
    path = folder / "journal.jsonl"
    began = time.monotonic() if began is None else began
    if main:
        with writing(folder):
            (folder / "weights").mkdir(parents=True, exist_ok=True)
    lost = damage(path) if main else ""
    state, resumed, before = resume.resume(config, world, run, folder, sources)
    refuse_single_values(config, world, run)
    found = before.get("duplicates")
    if found is None:
        found = duplicates(run.train.images, run.val.images, execution.duplicates, world)
    details = optimizers.lines(run.model, config.optim, config.lr)
    held = getattr(run.val.images, "notes", ())
    notes = [*pretrained.lines(config), *run.frozen, *details, *run.train.notes, *held, *run.notes, *found]
    if main:
        write_json(folder / "config.json", config.to_dict())
    total = config.epochs * len(run.train)
    with ExitStack() as stack:
        loggers = open_loggers(execution.log, folder, config.to_dict()) if main else ()
        journal = Journal(path if main else None, loggers)
        stack.callback(journal.close)
        for place in (folder, folder / "weights") if main else ():
            remove_half_written(place)  # the journal has one writer: this process
        bar = ProgressBar(total, config.epochs, enabled=main, done=state.steps)
        stack.callback(bar.close)
        request = stack.enter_context(stop_requests())
        if before:
            signals.take_stops()
        watched = Heartbeat(world, run_store(world), recovery.hang_timeout, folder, partial(append, path))
        beat = stack.enter_context(watched)
        every = recovery.checkpoint_interval
        deadline = began + recovery.max_seconds if recovery.max_seconds else math.inf
        keeps = main and every.count
        writer = Writer(folder / "checkpoints", recovery.keep, execution.collective_timeout) if keeps else None
        wish = resize.wishes(config, world, run, folder, writer) if main and resizable else None
        control = Control(world, request, every, len(run.train), deadline, wish)
        live = Session(config, world, run, folder, state, journal, bar, control, beat, writer, mirror)
        live.before, live.duplicates, run.step.check.report = before, found, live.note_law
        live.sources = sources or {}
        printed = [line for line in notes if execution.verbose or line not in details]
        _note_its_start(live, notes, [*summary(config, world, run), *printed, *resumed.splitlines()], lost)
        stack.push(partial(_note_its_end, live))
        yield live


def _note_its_start(live: Session, notes: list[str], lines: list[str], lost: str) -> None:
    """Write the `run` record, and say how the run starts; of processes that take the place of others a line comes
    with the next batch. `lost`: what of the journal can't be read."""
    before, record = live.before, run_record(live.config, live.world, live.run, live.state.steps, notes)
    if live.sources:
        record["sources"] = live.sources
    if before:
        live.began -= before["seconds"]
        record["resized_from"] = before["before"]
    live.journal.write(record)
    if lost:
        live.journal.write(FaultRecord(kind="fault", fault="journal", step=live.state.steps, cause=lost))
    for line in [*([] if before else lines), *([lost] if lost else [])]:
        live.bar.write(line)


def _note_its_end(live: Session, _: object, raised: BaseException | None, __: object) -> None:
    """Write the `end` record, whatever becomes of the session; none where other processes go on."""
    if raised is not None and live.writer is not None:
        with suppress(UserError):  # the first error is the one to tell; a write under way gets a moment to end well
            live.writer.close(_LAST_WRITE_S)
        live.note_written()
    if live.resize is not None and raised is None:
        live.journal.leave()
        return
    state = live.state
    done = is_over(live.config, state)
    if live.world.rank == 0 and not is_sharded(live.run.model):  # of sharded weights nobody has all
        live.digest = weights.digest(live.run.model)
    stopped = live.stop or is_of_a_signal(raised)
    end = EndRecord(
        kind="end",
        status="completed" if done and raised is None else "interrupted" if stopped else "failed",
        steps=state.steps,
        samples=state.samples,
        seconds=round(time.monotonic() - live.began, 3),
        top1=state.metrics.top1 if state.metrics else None,
        loss=state.metrics.loss if state.metrics else None,
        ledger_sha256=state.ledger.digest.hex(),
        weights_sha256=live.digest,
        processes=live.world.size,
        skipped=live.run.step.skipped,
        peak_memory_gib=live.peak_memory_gib,
    )
    if raised is not None and not stopped:
        end["error"] = str(exit_error(raised) if isinstance(raised, SystemExit) else raised)
    if end["skipped"]:
        live.bar.write(f"{end['skipped']} step(s) left out, whose gradients were not finite")
    live.journal.write(end)
