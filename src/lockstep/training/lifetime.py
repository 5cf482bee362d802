"""From where a run resumes to its journal's `end` record: the session's parts are opened, watched and closed here."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from lockstep.checkpoint import weights
from lockstep.checkpoint.writer import Writer
from lockstep.config import Config
from lockstep.config.objects import exit_error, is_of_a_signal
from lockstep.data.duplicates import duplicates
from lockstep.errors import UserError
from lockstep.parallel.sharded import is_sharded
from lockstep.processes.files import remove_half_written, write_json
from lockstep.processes.output import print_to
from lockstep.processes.world import World
from lockstep.training import resume
from lockstep.training.assemble import Run
from lockstep.training.choose import over
from lockstep.training.control import Control, stop_requests
from lockstep.training.cuts import probe
from lockstep.training.session import Session
from lockstep.training.single import refuse_single_values
from lockstep.training.summary import fine_tuning, run_record, summary
from lockstep.watch.heartbeat import Heartbeat, run_store
from lockstep.watch.journal import Journal, append, mend
from lockstep.watch.mirrors import open_mirrors
from lockstep.watch.progress import ProgressBar
from lockstep.watch.records import EndRecord, TroubleRecord

_LAST_WRITE_S = 3.0  # less than what a launcher leaves a failing process


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
        stopped = live.stop or is_of_a_signal(raised)
        end = EndRecord(
            kind="end",
            status="completed" if done and raised is None else "interrupted" if stopped else "failed",
            steps=state.steps,
            samples=state.samples,
            seconds=round(time.monotonic() - began, 3),
            top1=state.metrics.top1 if state.metrics else None,
            loss=state.metrics.loss if state.metrics else None,
            ledger_sha256=state.ledger.digest.hex(),
            weights_sha256=live.digest or _digest(live),
            processes=live.world.size,
            skipped=live.run.step.skipped,
            peak_memory_gib=live.peak_memory_gib,
        )
        if raised is not None and not stopped:
            end["error"] = str(exit_error(raised) if isinstance(raised, SystemExit) else raised)
        if end["skipped"]:
            live.bar.write(f"{end['skipped']} step(s) left out, whose gradients were not finite")
        live.journal.write(end)
