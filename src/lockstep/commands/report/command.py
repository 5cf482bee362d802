"""`lockstep report`: its words and its exit code. Without pictures it imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from lockstep.commands.shared.arguments import parse, refuse_launched
from lockstep.config import Execution
from lockstep.config.execution import Device
from lockstep.config.fields import require_at_least
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError
from lockstep.inference.mistakes import Mistakes

_REASON = 400  # characters of an error's message, and of its remedy


@dataclass(frozen=True)
class Report:
    """What `lockstep report` takes beside the runs."""

    out: Annotated[str, arg(help_behavior_hint="(default: report.html in the first run's folder)")] = ""
    """The page to write; one that is there is written over."""
    json: Annotated[str, arg(help_behavior_hint="(default: none)")] = ""
    """Write the page's data to this file as well."""
    pictures: bool = True
    """Show the pictures that the weights are most confidently wrong about: that evaluates each run again."""
    mistakes: int = 24
    """How many of them, over all runs."""
    data_dir: Annotated[str, arg(help_behavior_hint="(default: the run's)")] = ""
    """Where the data for them lies; nothing is downloaded."""
    device: Device = "auto"
    """Kind of device to evaluate on; auto takes the accelerator where there is one."""
    trust_code: bool = False
    """Import and call the code that a run's config.json names, as --model package.module:factory did."""

    def __post_init__(self) -> None:
        require_at_least(0, self, "mistakes")


def main(args: list[str]) -> int:
    """Write a page of what runs did."""
    names, rest = split_arguments(args, Report)
    about = (
        "Write one HTML page of one run, or of several side by side. It needs no network, and shows without a script."
    )
    chosen: Report = parse(Report, Report(), rest, "lockstep report RUN [RUN ...]", about)
    if not names:
        raise UserError("report needs a run folder", "As `lockstep report runs/digits-20260101-120000`.")
    refuse_launched("report")
    from lockstep.commands.report.page import bounded
    from lockstep.commands.report.runs import runs
    from lockstep.processes.files import write_text

    told = runs(names)
    if chosen.pictures:
        for each in told:
            each.mistakes = _mistakes(each.folder, chosen, chosen.mistakes // len(told))
            if each.mistakes.why_not:
                print(f"{each.name}: the pictures are missing: {each.mistakes.why_not}")
    page, data = bounded(told)
    out = Path(chosen.out) if chosen.out else Path(names[0]) / "report.html"
    write_text(out, page)
    print(f"{out}: {len(told)} run(s), {len(page.encode()) / 1e3:,.0f} kB")
    if chosen.json:
        write_text(Path(chosen.json), json.dumps(data, allow_nan=False, indent=1) + "\n")
        print(chosen.json)
    return 0


def _mistakes(folder: str, chosen: Report, most: int) -> Mistakes:
    """Found in this process; where weights, data or trust are missing, why not."""
    from lockstep.inference.find_mistakes import find_mistakes
    from lockstep.processes.launcher import launch

    execution = Execution(nproc=1, device=chosen.device)
    try:
        found: Mistakes = launch(find_mistakes, folder, chosen.data_dir, chosen.trust_code, most, execution=execution)[
            0
        ]
    except UserError as error:
        reason = ". ".join(part[:_REASON] for part in (error.message, error.remedy) if part)
        return Mistakes(why_not=reason)  # a forged config may be quoted in it, however long that is
    return found
