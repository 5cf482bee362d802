"""The report as one HTML page: all of it is there without a network, and without a script."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.commands.report import charts, classes, facts, pictures, timeline
from lockstep.commands.report.as_json import plain
from lockstep.commands.report.runs import Told
from lockstep.commands.report.style import script, style
from lockstep.commands.shared.markup import embedded_json, tag
from lockstep.commands.shared.page import document

DATA = "report-data"  # the id of the page's JSON


_LARGEST = 2_000_000  # bytes: what still goes by mail, and opens at once on a phone
# points of all curves of one kind together, and mistakes of all runs: the first that fits is taken
_LEVELS = ((800, 1000), (400, 24), (200, 12), (100, 4), (60, 0))


def bounded(told: Sequence[Told]) -> tuple[str, dict[str, Any]]:
    """The page in no more bytes than a page may have, and its data: long curves and many pictures are thinned."""
    for points, shown in _LEVELS:
        fewer = [
            replace(each, mistakes=replace(each.mistakes, shown=each.mistakes.shown[: shown // len(told)]))
            for each in told
        ]
        share = max(12, points // max(1, len(told)))
        page = html(fewer, share)
        if len(page.encode()) < _LARGEST:
            break
    return page, plain(fewer, share)


def html(told: Sequence[Told], points: int = 400) -> str:
    """The page. `points`: of a curve, at most."""
    title = "Report of " + (told[0].name if len(told) == 1 else f"{len(told)} runs")
    parts = [
        ("Curves", [charts.switches(told), tag("div", *charts.figures(told, points), class_="charts")]),
        ("What differs between the configs", [facts.config_differences(told)] if len(told) > 1 else []),
        ("Time line", [*timeline.tracks(told), timeline.events(told)]),
        ("Where the time went", list(timeline.spent(told))),
        ("Classes", list(classes.sections(told))),
        ("Most confident mistakes", list(pictures.sections(told))),
        ("Exactness", list(facts.exactness(told))),
        ("Environment", list(facts.environment(told))),
        ("To repeat it", list(facts.commands(told))),
    ]
    main = tag(
        "main",
        tag("h1", title),
        tag("p", "Numbers are those of the runs' journals; nothing here is loaded from elsewhere.", class_="soft"),
        facts.cards(told),
        "\n",
        facts.joined_with_headings(parts),
    )
    return document(title, style(), [main, embedded_json(plain(told, points), DATA)], script())
