"""`lockstep resize`: give a run under way on this machine another number of processes. Imports no torch."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.commands.watch import describe
from lockstep.config.fields import Arg
from lockstep.distributed.files import writer
from lockstep.distributed.output import status
from lockstep.distributed.resize import asked, read_request
from lockstep.errors import UserError
from lockstep.monitoring.journal import JOURNAL, Reader
from lockstep.monitoring.runs import ENDS, RunSummary, integer, text

_LOOK_S = 0.05  # between two looks at the journal


@dataclass(frozen=True)
class Resizing:
    """What to change."""

    nproc: Annotated[int, Arg(least=0, most=1024, unset="required")] = 0
    """Processes that shall go on from the next step boundary."""


def main(args: list[str]) -> int:
    """Ask, and wait until the run goes on."""
    about = (
        "Give a run on this machine another number of processes, at its next step boundary and from its memory. "
        "Global batch, order and results stay; no checkpoint is read. Ctrl-C takes the request back. "
        "Exit code 0: it goes on with so many; 2: it doesn't, and why."
    )
    names, chosen = parse(Resizing(), args, about)
    folder = Path(one_name("resize", "run folder", names, "runs/mine --nproc 3"))
    if not chosen.nproc:
        raise UserError("resize needs --nproc, a number of processes", "As `lockstep resize runs/mine --nproc 3`.")
    _require_running(folder)
    reader, run = Reader(folder / JOURNAL), RunSummary(folder)
    _news(reader, run)
    with asked(folder, chosen.nproc):
        print(_await(folder, chosen.nproc, reader, run))
    return 0


def _require_running(folder: Path) -> None:
    who = writer(folder)
    if who == "here":
        return
    if who == "elsewhere":
        raise UserError(f"{folder} runs on another machine", "Give the command there.")
    if not (folder / JOURNAL).is_file():
        raise UserError(f"{folder} holds no run", "Name a run folder; `lockstep runs` lists them.")
    raise _over(folder)


def _news(reader: Reader, run: RunSummary, nproc: int = 0) -> str:
    """Take in the journal's new records; what they say of a resize to so many processes."""
    said = ""
    for record in reader if reader.path.is_file() else ():
        run.add(record)
        if record["kind"] == "resize" and record.get("processes") == nproc:
            said = describe(record, run)
    return said


def _await(folder: Path, nproc: int, reader: Reader, run: RunSummary) -> str:
    """What came of the request. Raises UserError where the run stays as it is, or ends."""
    began = time.monotonic()
    while True:
        gone = writer(folder) != "here"  # before the last look: what it wrote last is then there to read
        request = read_request(folder)
        if said := _news(reader, run, nproc):
            return said
        if request is not None and request.answer:
            if request.done:
                return f"{folder} {request.answer}"
            raise UserError(f"{folder} stays as it is: {request.answer}")
        if gone:
            raise _over(folder)
        status(f"waiting for the next step boundary of {folder}: {time.monotonic() - began:.0f} s")
        time.sleep(_LOOK_S)


def _over(folder: Path) -> UserError:
    """The error for a run that no process trains."""
    run = RunSummary(folder)
    _news(Reader(folder / JOURNAL), run)
    how = ENDS.get(text(run.last, "status")) if run.last.get("kind") == "end" else None
    why = f"it has {how} at step {integer(run.last, 'steps')}" if how else "its process is gone and left no end"
    remedy = "" if how == "ended" else f"`lockstep train --out {folder} --nproc M` goes on from its checkpoint."
    return UserError(f"{folder} does not run: {why}", remedy)
