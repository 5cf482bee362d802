"""A run under way on one rank: its parts, where it is, and those who watch it."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from lockstep.checkpoint import weights
from lockstep.checkpoint.snapshot import contribute
from lockstep.checkpoint.store import abandon
from lockstep.checkpoint.verified import Loaded, newest
from lockstep.checkpoint.writer import Writer
from lockstep.config import Config
from lockstep.data.duplicates import duplicates
from lockstep.errors import PeerError, UserError
from lockstep.parallel.data_parallel import driven
from lockstep.parallel.modules import all_finite
from lockstep.parallel.repeatable import rounding
from lockstep.parallel.sharded import is_sharded, local
from lockstep.processes.files import remove_half_written, write_json
from lockstep.processes.memory import peaks_gib
from lockstep.processes.output import print_to, take_broken
from lockstep.processes.world import World
from lockstep.training import resume
from lockstep.training.assemble import Run
from lockstep.training.choose import over
from lockstep.training.control import OUT_OF_TIME, Control, stop_requests
from lockstep.training.cuts import probe
from lockstep.training.single import refuse_single_values
from lockstep.training.state import State
from lockstep.training.summary import fine_tuning, run_record, summary
from lockstep.training.window import NonFinite
from lockstep.watch.heartbeat import Heartbeat, run_store
from lockstep.watch.journal import Journal, append, mend
from lockstep.watch.mirrors import open_mirrors
from lockstep.watch.progress import ProgressBar
from lockstep.watch.records import EndRecord, RollbackRecord, StopRecord, TroubleRecord

_ROLLBACKS = 10  # more than this is not a bad batch but a bad experiment
_LAST_WRITE_S = 3.0  # less than what a launcher leaves a failing process


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
    rollbacks: int = 0
    peak_memory_gib: list[float] = field(default_factory=list)  # by rank and its devices, once it has settled
    digest: str = ""  # of sharded weights, likewise
    stop: int = 0  # the signal by which the ranks agreed to stop, or OUT_OF_TIME
    compiled: set[tuple[str | int, ...]] = field(default_factory=set)  # the kinds and shapes of work seen so far

    @property
    def keeps(self) -> bool:
        """True where the run takes checkpoints at all."""
        return self.control.every.count > 0

    @property
    def failed(self) -> bool:
        """True on the rank whose last write failed."""
        return self.writer is not None and self.writer.failed

    def compiling(self, *work: str | int) -> AbstractContextManager[None]:
        """Around work of a kind and of shapes: with --compile the first of them may be compiled, for minutes."""
        if not self.config.model.compile or work in self.compiled:
            return nullcontext()
        self.compiled.add(work)
        return self.beat.long_phase("compilation")

    def checkpoint(self) -> None:
        """Save all that a resume needs; every rank calls it at the same step. Training waits for the copy alone."""
        state = self.state
        self.beat.at(state.steps, "checkpoint")
        self.run.synchronize()
        self._require_finite()
        if self.writer is not None:
            saved = {
                "progress": state.to_dict(),
                "config": self.config.to_dict(),
                "data": self.run.train.images.fingerprint,
                "rounding": rounding(self.world.device),
            }
            step, best = self.run.step, state.best_step
            # else weights change between two updates as well
            overlap = step.passes_write is False and self.config.link.sync_every == 1
            moment = (state.steps, self.run.model, step.optimizer, step.scaler, self.run.ema, saved, best)
            with step.sync.gathered():
                self.writer.save(*moment, overlap=overlap)
        else:
            with self.run.step.sync.gathered():
                if is_sharded(self.run.model):
                    contribute(self.run.model, self.run.step.optimizer, self.run.ema)
        self.control.saved()
        self.note_written()

    def note_written(self) -> None:
        """Put the checkpoints that have come to the disk into the journal, and that output was turned off."""
        if self.world.rank == 0 and (cause := take_broken()):
            self.journal.write(TroubleRecord(kind="fault", fault="output", step=self.state.steps, cause=cause))
        if self.writer is not None:
            for saved in self.writer.finished():
                self.journal.write(saved)

    def end_by(self, stop: int) -> None:
        """Go on (0), or leave the loop by a signal or OUT_OF_TIME, on which the ranks agreed."""
        self.stop = stop
        if stop == OUT_OF_TIME:
            self.note_end("max-time", self.state.epochs)

    def note_end(self, reason: Literal["patience", "max-time"], epoch: int) -> None:
        """Write the `stop` record, and say it."""
        state, choose = self.state, self.config.choose
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
        if self.writer is not None and (error := self.writer.failure()) is not None:
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
            peaks = self.world.gather(peaks_gib(driven(self.run.step.model)))
            self.peak_memory_gib = [peak for each in peaks for peak in each]

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
            RollbackRecord(
                kind="fault", fault="rollback", step=bad.step, back_to=loaded.step, skipped=skipped, error=bad.message
            )
        )
        self.bar.write(f"{bad.message}: back to step {loaded.step}, leaving out the batch of step {bad.step + 1}")

    def _require_finite(self) -> None:
        """A checkpoint of NaN would be the newest good one: refuse to take it. Waits for the device, once."""
        parameters = [local(p.detach()) for p in self.run.model.parameters() if p.is_floating_point()]
        broken = not all_finite(parameters, self.world.device)
        if any(self.world.gather(broken)) if is_sharded(self.run.model) else broken:
            step = self.state.steps - 1
            raise NonFinite(step, f"the weights became non-finite at step {step + 1}")


def _digest(live: Session) -> str:
    """Of the weights as rank 0 has them; of sharded ones nobody has all."""
    return weights.digest(live.run.model) if live.world.rank == 0 and not is_sharded(live.run.model) else ""


@contextmanager
def session(config: Config, world: World, run: Run, folder: Path, began: float | None = None) -> Iterator[Session]:
    """Resume a run where it can go on, and have it watched; leaves the journal's `end` record behind."""
    main, recovery, execution = world.rank == 0, config.recovery, config.execution
    path = folder / "journal.jsonl"
    began = time.monotonic() if began is None else began
    lost = mend(path) if main else ""
    state, resumed = resume.resume(config, world, run, folder)
    refuse_single_values(config, world, run)
    found = duplicates(run.train.images, run.val.images, execution.duplicates, world)
    notes = [*fine_tuning(config, run), *run.train.notes, *run.notes, *found, *probe(config, world, run)]
    if main:
        write_json(folder / "config.json", config.to_dict())
    total = config.epochs * len(run.train)
    with ExitStack() as stack:
        mirrors = open_mirrors(execution.log, folder, config.to_dict()) if main else ()
        journal = Journal(path if main else None, mirrors, alone=True)
        stack.callback(journal.close)
        for place in (folder, folder / "weights") if main else ():
            remove_half_written(place)  # the journal has one writer: this process
        bar = ProgressBar(total, config.epochs, enabled=main, done=state.steps)
        stack.callback(bar.close)

        def leave_terminal() -> None:  # writing to one that was closed would fail
            bar.disable()
            print_to(folder / "output.log")

        request = stack.enter_context(stop_requests(recovery.on_hangup, leave_terminal))
        watched = Heartbeat(world, run_store(world), recovery.hang_timeout, folder, partial(append, path))
        beat = stack.enter_context(watched)
        every = recovery.checkpoint_interval
        deadline = began + recovery.max_seconds if recovery.max_seconds else math.inf
        control = Control(world, request, every, len(run.train), deadline)
        keeps = main and every.count
        writer = Writer(folder / "checkpoints", recovery.keep, execution.collective_timeout) if keeps else None
        live = Session(config, world, run, folder, state, journal, bar, control, beat, writer)
        journal.write(run_record(config, world, run, state.steps, notes))
        if lost:
            journal.write(TroubleRecord(kind="fault", fault="journal", step=state.steps, cause=lost))
        for line in [*summary(config, world, run), *notes, *resumed.splitlines(), *([lost] if lost else [])]:
            bar.write(line)
        yield from _until_its_end(live)


def _until_its_end(live: Session) -> Iterator[Session]:
    """Hand the session to the loop, and write the `end` record whatever becomes of it."""
    began, raised = time.monotonic(), None
    try:
        yield live
    except BaseException as error:
        raised = error
        raise
    finally:
        if raised is not None and live.writer is not None:
            with suppress(UserError):  # the first error is the one to tell; a write under way gets a moment to end well
                live.writer.close(_LAST_WRITE_S)
            live.note_written()
        state = live.state
        done = over(live.config, state)
        stopped = live.stop or isinstance(raised, KeyboardInterrupt | SystemExit)
        end = EndRecord(
            kind="end",
            status="completed" if done and raised is None else "interrupted" if stopped else "failed",
            steps=state.steps,
            samples=state.samples,
            seconds=round(time.monotonic() - began, 3),
            top1=state.metrics.top1 if state.metrics else None,
            loss=state.metrics.loss if state.metrics else None,
            ledger_sha256=state.ledger.hex(),
            weights_sha256=live.digest or _digest(live),
            processes=live.world.size,
            skipped=live.run.step.skipped,
            peak_memory_gib=live.peak_memory_gib,
        )
        if raised is not None and not stopped:
            end["error"] = str(raised)
        if end["skipped"]:
            live.bar.write(f"{end['skipped']} step(s) left out, whose gradients were not finite")
        live.journal.write(end)
