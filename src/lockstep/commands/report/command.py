"""`lockstep report`: its flags and its exit code. Without pictures it imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from lockstep.commands.shared.arguments import parse, refuse_launched
from lockstep.config import Execution
from lockstep.config.execution import Device
from lockstep.config.fields import Arg, Count, check_fields
from lockstep.errors import UserError, shown
from lockstep.inference.mistakes import Mistakes

_REASON = 400  # characters of an error's message, and of its remedy


@dataclass(frozen=True)
class Report:
    """What `lockstep report` takes beside the runs."""

    out: Annotated[str, Arg(unset="report.html in the first run's folder")] = ""
    """The page to write; one that is there is written over."""
    json: Annotated[str, Arg(unset="none")] = ""
    """Write the page's data to this file as well."""
    pictures: bool = True
    """Show the pictures that the weights are most confidently wrong about: that evaluates each run again."""
    mistakes: Count = 24
    """How many of them, over all runs."""
    data_dir: Annotated[str, Arg(unset="the run's")] = ""
    """Where the data for them lies; nothing is downloaded."""
    device: Device = "auto"
    """Kind of device to evaluate on; auto takes the accelerator where there is one."""
    trust_code: bool = False
    """Import and call the code that a run's config.json names, as --model package.module:factory did."""

    def __post_init__(self) -> None:
        check_fields(self)


def main(args: list[str]) -> int:
    """Write a page of what runs did."""
    about = (
        "Write one HTML page of one run, or of several side by side. It needs no network, and shows without a script."
    )
    names, chosen = parse(Report(), args, about)
    if not names:
        raise UserError("report needs a run folder", "As `lockstep report runs/digits-20260101-120000`.")
    if chosen.pictures:  # this imports torch
        refuse_launched("report")
    from lockstep.commands.report.page import as_data, html, load_runs
    from lockstep.distributed.files import require_folder, write_text

    for given in filter(None, (chosen.out, chosen.json)):
        require_folder(Path(given))
    runs = load_runs(names)
    for run in runs if chosen.pictures else ():
        run.mistakes = _mistakes(run.folder, chosen, chosen.mistakes // len(runs))
        if run.mistakes.why_not:
            print(f"{shown(run.name)}: the pictures are missing: {shown(run.mistakes.why_not)}")
    data = as_data(runs)
    page = html(runs, data)
    out = Path(chosen.out) if chosen.out else Path(names[0]) / "report.html"
    write_text(out, page)
    print(f"{shown(str(out))}: {len(runs)} run(s), {len(page.encode()) / 1e3:,.0f} kB")
    if chosen.json:
        write_text(Path(chosen.json), json.dumps(data, allow_nan=False, indent=1) + "\n")
        print(shown(chosen.json))
    return 0


def _mistakes(folder: str, chosen: Report, most: int) -> Mistakes:
    """Found in this process; where weights, data or trust are missing, why not."""
    from lockstep.distributed.launcher import launch
    from lockstep.inference.find_mistakes import find_mistakes

    execution = Execution(nproc=1, device=chosen.device)
    try:
        (found,) = launch(find_mistakes, folder, chosen.data_dir, chosen.trust_code, most, execution=execution)
    except UserError as error:
        reason = ". ".join(part[:_REASON] for part in (error.message, error.remedy) if part)
        return Mistakes(why_not=reason)  # a forged config may be quoted in it, however long that is
    return cast(Mistakes, found)
