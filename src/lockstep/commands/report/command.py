"""`lockstep report`: its words and its exit code. Imports torch only where pictures are asked for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from lockstep.commands.shared.arguments import parse
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError


@dataclass(frozen=True)
class Report:
    """What `lockstep report` takes beside the runs."""

    out: Annotated[str, arg(help_behavior_hint="(default: report.html in the first run's folder)")] = ""
    """The page to write; one that is there is written over."""
    json: Annotated[str, arg(help_behavior_hint="(default: none)")] = ""
    """Write the page's data to this file as well."""


def main(args: list[str]) -> int:
    """Write a page of what runs did."""
    names, rest = split_arguments(args, Report)
    about = (
        "Write one HTML page of one run, or of several side by side. It needs no network, and shows without a script."
    )
    chosen: Report = parse(Report, Report(), rest, "lockstep report RUN [RUN ...]", about)
    if not names:
        raise UserError("report needs a run folder", "As `lockstep report runs/digits-20260101-120000`.")
    from lockstep.commands.report.as_json import plain
    from lockstep.commands.report.page import html
    from lockstep.commands.report.runs import runs
    from lockstep.processes.files import write_text

    told = runs(names)
    page, points = html(told), 400 // len(told)
    out = Path(chosen.out) if chosen.out else Path(names[0]) / "report.html"
    write_text(out, page)
    print(f"{out}: {len(told)} run(s), {len(page.encode()) / 1e3:,.0f} kB")
    if chosen.json:
        write_text(Path(chosen.json), json.dumps(plain(told, points), allow_nan=False, indent=1) + "\n")
        print(chosen.json)
    return 0
