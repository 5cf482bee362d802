"""A run under way on one rank: its parts, where it is, and those who watch it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.checkpoint import weights
from lockstep.checkpoint.snapshot import contribute
from lockstep.checkpoint.store import abandon
from lockstep.checkpoint.verified import Loaded, newest
from lockstep.checkpoint.writer import Writer
from lockstep.config import Config
from lockstep.errors import PeerError
from lockstep.parallel.data_parallel import driven
from lockstep.parallel.modules import all_finite
from lockstep.parallel.repeatable import rounding
from lockstep.parallel.sharded import is_sharded, local
from lockstep.processes.memory import peaks_gib
from lockstep.processes.output import take_broken
from lockstep.processes.world import World
from lockstep.training import resume
from lockstep.training.assemble import Run
from lockstep.training.control import OUT_OF_TIME, Control
from lockstep.training.state import State
from lockstep.training.window import NonFinite
from lockstep.watch.heartbeat import Heartbeat
from lockstep.watch.journal import Journal
from lockstep.watch.progress import ProgressBar
from lockstep.watch.records import RollbackRecord, StopRecord, TroubleRecord

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
        self.bar.doing(f"compiling: {work[0]}")
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
            raise NonFinite(step, f"the weights became non-finite at step {step + 1}", self.config)
