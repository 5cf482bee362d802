"""`lockstep audit`: its flags, the starts, the exit code. Imports no torch: the user's processes do."""

import dataclasses
import sys
import time
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Literal

from lockstep.commands.audit.faults import times
from lockstep.commands.audit.findings import findings
from lockstep.commands.audit.launch import other_starts, start, starter
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.records import Record, of
from lockstep.commands.audit.report import as_json, text
from lockstep.commands.shared.arguments import parse, print_error
from lockstep.config.fields import Arg, Ints, Positive, require
from lockstep.distributed.files import temporary_folder
from lockstep.distributed.output import status
from lockstep.errors import EXIT_FAILURE, EXIT_USER_ERROR, UserError


@dataclass(frozen=True)
class Audit:
    """How to run a script."""

    nproc: Annotated[Ints, Arg(least=1)] = (1, 2, 3)
    """Numbers of processes to run the script on, one after the other: an odd one shows what a set's padding does."""
    nnodes: Positive = 1
    """Machines to pretend: where N can be divided by it, each has its part of the ranks, from local rank 0."""
    cuda: bool = True
    """Pretend GPUs, one for each process: torch.cuda answers, tensors lie in memory, and gloo does NCCL's work."""
    samples: Positive = 256
    """The most samples that are kept of a data set."""
    epochs: Positive = 2
    """Training epochs after which the script is ended."""
    timeout: Annotated[float, Arg(above=0)] = 600.0
    """Seconds that the script has on each number of processes."""
    format: Literal["text", "json"] = "text"
    """How findings are written."""

    def __post_init__(self) -> None:
        require(bool(self.nproc), "--nproc names no number of processes", "As --nproc 1,2,3.")
        if all(each % self.nnodes for each in self.nproc):
            raise UserError(f"no number of --nproc is divided by {self.nnodes} machines", "As --nproc 4 --nnodes 2.")


_ENDED = {
    "failed": "failed",
    "stalled": "came to a standstill",
    "deadline": "was not done after --timeout {:g}",
}


def main(args: list[str]) -> int:
    """Run a script on several numbers of processes; 0: nothing found, 1: findings, 2: it could not be run."""
    about = (
        "Run a training script, unchanged and in a copy of its folder, on several numbers of processes of this machine "
        "with small data, and say with numbers what N changes. Flags come before SCRIPT, or before -m MODULE as python "
        "takes it; the script's own arguments after it, in which {nproc} is replaced by the number of processes and "
        "{rank} by each one's rank. Exit codes: 0 nothing found, 1 something found, 2 it could not be run."
    )
    at = args.index("-m") if "-m" in args else len(args)
    names, chosen = parse(Audit(), args[:at], about, script=True)
    names += args[at:]  # behind a script these are its own
    if not names or names == ["-m"]:
        raise UserError("audit takes a script, got none", "As `lockstep audit --nproc 1,2,4 train.py --epochs 1`.")
    script, module = names.pop(0), ""
    path = origin = Path(script).absolute()
    if script == "-m":
        script = module = names.pop(0)
        path, module = _of_module(module, origin := Path.cwd())
    elif path.is_file():
        origin = path.parent
    else:
        raise UserError(f"{script} is not there", "Name a Python file, or a module behind -m.")
    plan = Plan(
        "", (), "", str(origin), "", 1, module=module, cuda=chosen.cuda, samples=chosen.samples, epochs=chosen.epochs,
        deadline_s=chosen.timeout, begun=time.time(),
    )  # fmt: skip
    records, others = run(path, names, plan, chosen)
    failed = [each for each in records if each.ended != "done"]
    found = findings(records, others)
    print((as_json if chosen.format == "json" else text)(path, records, found))
    if failed and all(each.note for each in found):
        how = _ENDED[failed[0].ended].format(chosen.timeout)
        print_error(f"{script} {how} on {times(failed[0].nproc, 'process', 'processes')}:\n{_last_words(failed[0])}")
        return EXIT_USER_ERROR
    if not found and not any(of(events, "step") for each in records for events in each.ranks.values()):
        print_error(f"{script} took no step of an optimizer that could be seen: its training can't be judged")
        return EXIT_USER_ERROR
    return EXIT_FAILURE if any(not each.note for each in found) else 0


def _of_module(name: str, folder: Path) -> tuple[Path, str]:
    """The file that `python -m NAME` runs in a folder, which it lies below, and the whole name of its module."""
    own = [each for each in sys.path if Path(each).is_relative_to(folder) and "site-packages" not in each]
    places: list[str] | None = [str(folder), *own]
    spec = None
    for part in [*name.split("."), "__main__"]:
        if places is None:  # no package: its own file is run
            break
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            raise UserError(f"there is no module {name} below {folder}", "Go to the folder where python -m finds it.")
        places = spec.submodule_search_locations
    assert spec is not None
    return Path(str(spec.origin)), f"{name}.__main__" if spec.name == "__main__" else name


def run(script: Path, arguments: list[str], plan: Plan, chosen: Audit) -> tuple[list[Record], list[Record]]:
    """The records of a script on each number of processes, up to one on which it fails; and of other starts."""
    records = []
    with temporary_folder("audit-") as folder, starter(script) as process:
        for nproc in sorted(set(chosen.nproc)):
            status(f"{script.name} on {times(nproc, 'process', 'processes')}, {chosen.timeout:g} s at most")
            planned = dataclasses.replace(plan, nproc=nproc, nodes=1 if nproc % chosen.nnodes else chosen.nnodes)
            records.append(start(process, script, arguments, planned, Path(folder) / str(nproc)))
            if records[-1].ended != "done":
                break
        return records, other_starts(process, script, arguments, plan, Path(folder), records)


def _last_words(record: Record) -> str:
    number = next((i for i, code in enumerate(record.codes) if code > 0), 0)
    return record.printed[number][-4000:]
