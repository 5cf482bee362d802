"""What `lockstep audit` takes, and its exit code. Imports no torch: the user's processes do."""

import dataclasses
import time
from pathlib import Path

from lockstep.commands.audit.beside import beside
from lockstep.commands.audit.findings.every import findings
from lockstep.commands.audit.findings.finding import times
from lockstep.commands.audit.judged import judged
from lockstep.commands.audit.launch import start, starter
from lockstep.commands.audit.output import as_json, text
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.records import Record, of
from lockstep.commands.audit.settings import Audit
from lockstep.commands.shared.arguments import parse, print_error, script_among
from lockstep.errors import EXIT_FAILURE, EXIT_USER_ERROR, UserError
from lockstep.processes.output import status
from lockstep.processes.temporary import temporary_folder

_ENDED = {
    "failed": "failed",
    "stalled": "came to a standstill",
    "deadline": "was not done after --timeout {:g}",
}


def main(args: list[str]) -> int:
    """Run a script on several numbers of processes; 0: nothing found, 1: findings, 2: it could not be run."""
    own, script, arguments = script_among(args, Audit)
    about = (
        "Run a training script of anybody's, unchanged and in a copy of its folder, on several numbers of processes of "
        "this machine with small data, and say with numbers what N changes. Flags come before SCRIPT, its own "
        "arguments after it; {nproc} in them is replaced by the number of processes. Exit codes: 0 nothing found, "
        "1 something found, 2 it could not be run."
    )
    chosen: Audit = parse(Audit, Audit(), own, "lockstep audit SCRIPT [ARGS]", about)
    if not script:
        raise UserError("audit takes a script, got none", "As `lockstep audit --nproc 1,2,4 train.py --epochs 1`.")
    path = Path(script).absolute()
    if not path.is_file():
        raise UserError(f"{script} is not there", "Name a Python file.")
    records, others = run(path, arguments, chosen)
    failed = [each for each in records if each.ended != "done"]
    found = findings(records, others)
    static = judged(path, found, records, others)
    print((as_json if chosen.format == "json" else text)(path, records, found, static))
    if failed and all(each.note for each in found):
        how = _ENDED[failed[0].ended].format(chosen.timeout)
        print_error(f"{script} {how} on {times(failed[0].nproc, 'process', 'processes')}:\n{_last_words(failed[0])}")
        return EXIT_USER_ERROR
    if not found and not any(of(events, "step") for each in records for events in each.ranks.values()):
        print_error(f"{script} took no step of an optimizer that could be seen: nothing can be said of its training")
        return EXIT_USER_ERROR
    wrong = any(not each.note for each in found) or any(each.verdict == "not observed" for each in static)
    return EXIT_FAILURE if wrong else 0


def run(script: Path, arguments: list[str], chosen: Audit) -> tuple[list[Record], list[Record]]:
    """The records of a script on each number of processes, up to one on which it fails; and of other starts."""
    records, begun = [], time.time()
    with temporary_folder("audit-") as folder, starter(script) as process:
        plan = Plan(
            "", (), "", "", "", 1, cuda=chosen.cuda, samples=chosen.samples, epochs=chosen.epochs,
            deadline_s=chosen.timeout, begun=begun,
        )  # fmt: skip
        for nproc in sorted(set(chosen.nproc)):
            status(f"{script.name} on {times(nproc, 'process', 'processes')}, {chosen.timeout:g} s at most")
            planned = dataclasses.replace(plan, nproc=nproc, nodes=1 if nproc % chosen.nnodes else chosen.nnodes)
            records.append(start(process, script, arguments, planned, Path(folder) / str(nproc)))
            if records[-1].ended != "done":
                break
        return records, beside(process, script, arguments, plan, Path(folder), records)


def _last_words(record: Record) -> str:
    number = next((i for i, code in enumerate(record.codes) if code > 0), 0)
    return record.printed[number][-4000:]
