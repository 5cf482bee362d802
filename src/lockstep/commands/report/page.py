"""The report as one HTML page: all of it is there without a network, and without a script."""

from collections.abc import Sequence

from lockstep.commands.report import charts, classes, facts, timeline
from lockstep.commands.report.as_json import plain
from lockstep.commands.report.runs import Told
from lockstep.commands.report.style import script, style
from lockstep.commands.shared.markup import embedded_json, tag
from lockstep.commands.shared.page import document

DATA = "report-data"  # the id of the page's JSON


def html(told: Sequence[Told], points: int = 400) -> str:
    """The page. `points`: of all curves of one kind together, at most; a curve has its share of them."""
    each = max(12, points // max(1, len(told)))
    title = "Report of " + (told[0].name if len(told) == 1 else f"{len(told)} runs")
    parts = [
        ("Curves", [charts.switches(told), tag("div", *charts.figures(told, each), class_="charts")]),
        ("What differs between the configs", [facts.config_differences(told)] if len(told) > 1 else []),
        ("Time line", [*timeline.tracks(told), timeline.events(told)]),
        ("Where the time went", list(timeline.spent(told))),
        ("Classes", list(classes.sections(told))),
        ("Exactness", list(facts.exactness(told))),
        ("Environment", list(facts.environment(told))),
        ("To repeat it", list(facts.commands(told))),
    ]
    main = tag(
        "main",
        tag("h1", title),
        tag("p", "All numbers are those of the runs' journals.", class_="soft"),
        facts.cards(told),
        "\n",
        facts.joined_with_headings(parts),
    )
    return document(title, style(), [main, embedded_json(plain(told, each), DATA)], script())
