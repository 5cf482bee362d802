"""The report's sections in words and tables: results, exactness, environment, differences, commands."""

from collections.abc import Iterator, Sequence

from lockstep.commands.report.curves import duration
from lockstep.commands.report.runs import Told, differences, state
from lockstep.commands.report.story import Attempt
from lockstep.commands.report.values import count
from lockstep.commands.shared.markup import Markup, joined, tag
from lockstep.commands.shared.page import table
from lockstep.watch.outside import group, number, text

NOTHING = "\N{EN DASH}"
_VALUE = 200  # characters of a value that the table of differences shows


def cards(told: Sequence[Told]) -> Markup:
    """A box a run: how it stands, and its result."""
    return tag("div", *(_card(run, each) for run, each in enumerate(told)), class_="facts")


def _card(run: int, told: Told) -> Markup:
    story, config = told.story, told.config
    tops, losses = story.evals.get("top1", []), story.evals.get("loss", [])
    top = f"{tops[-1][2]:.2%}" if tops else "not evaluated"
    best = max(tops, key=lambda p: p[2], default=None)
    step = max((a.last_step for a in story.attempts), default=0)
    epochs = count(config, "epochs")
    where = f"step {step:,}"
    if story.steps_per_epoch:
        where += f", epoch {step / story.steps_per_epoch:.4g}" + (f" of {epochs}" if epochs else "")
    worked, paused = sum(a.seconds for a in story.attempts), sum(a.pause for a in story.attempts)
    numbers = [a.processes for a in story.attempts if a.processes]
    rows = [
        ("state", f"{state(told)}, {where}"),
        ("model, data", " on ".join(filter(None, (_entry(told, "model", "model"), _entry(told, "data", "dataset"))))),
        ("validation loss", f"{losses[-1][2]:.4f}" if losses else ""),
        ("best top-1", f"{best[2]:.2%} at step {best[0]:,}" if best else ""),
        ("time", duration(worked) + (f", and {duration(paused)} between attempts" if paused >= 0.05 else "")),
        ("processes", ", then ".join(map(str, _runs_of(numbers)))),
        ("starts", f"{len(story.attempts)}" if len(story.attempts) > 1 else ""),
        ("images/s, median", f"{_median([p[2] for p in story.train.get('images_per_s', [])]):,.0f}"),
        ("damaged lines", f"{story.damaged} line(s) of the journal can't be read" if story.damaged else ""),
    ]
    return tag(
        "section",
        tag("h3", told.name),
        tag("div", top, class_="big"),
        tag("div", "top-1 on the validation set, last evaluation" if tops else None, class_="soft"),
        pairs([(name, value) for name, value in rows if value]),
        class_=f"card run run-{run}",
    )


def _entry(told: Told, of: str, name: str) -> str:
    return text(group(told.config, of), name)


def _runs_of(numbers: Sequence[int]) -> list[int]:
    """Without repetitions of neighbours."""
    return [n for k, n in enumerate(numbers) if not k or numbers[k - 1] != n]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def pairs(rows: Sequence[tuple[str, object]]) -> Markup:
    """Names and values, a line each."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows), class_="pairs")


def exactness(told: Sequence[Told]) -> Iterator[Markup]:
    """Which samples were seen and which weights came out, as digests; and what is equal between the runs."""
    rows = []
    for each in told:
        end, exact = each.story.end or {}, count(each.config, "exact")
        rows.append(
            [
                each.name,
                f"{exact} slices" if exact else "off",
                str(each.config.get("seed", NOTHING)),
                f"{count(end, 'steps') or 0:,}",
                _digest(text(end, "ledger_sha256")),
                _digest(text(end, "weights_sha256")),
                _digest(next((a.data.get("fingerprint", "") for a in each.story.attempts[::-1]), "")),
            ]
        )
    yield table(
        "Digests are SHA-256, of the last end that the journal records. The ledger's is over the ids of all samples, "
        "step by step: equal ones saw the same samples in the same order.",
        ["run", "exact mode", "seed", "steps", "ledger", "weights", "training data"],
        rows,
        words=True,
        label="Digests",
    )
    if len(told) > 1:
        for line in _equal(told):
            yield tag("p", line)


def _digest(digest: str) -> object:
    return tag("span", digest, class_="digest") if digest else NOTHING


def _equal(told: Sequence[Told]) -> Iterator[str]:
    ends = [(each.name, each.story.end or {}) for each in told]
    for name, what in (
        ("ledger_sha256", "the same samples in the same order"),
        ("weights_sha256", "equal weights, bit by bit"),
    ):
        alike: dict[str, list[str]] = {}
        for run, end in ends:
            if digest := text(end, name):
                alike.setdefault(digest, []).append(run)
        found = [runs for runs in alike.values() if len(runs) > 1]
        yield from (f"{' and '.join(runs)}: {what}." for runs in found)
        if alike and not found:
            yield f"No two of the runs have {what}."


def environment(told: Sequence[Told]) -> Iterator[Markup]:
    """Where each attempt ran."""
    rows = []
    for each in told:
        for place, attempt in enumerate(each.story.attempts, 1):
            rows.append(
                [
                    f"{each.name}, start {place}" if len(each.story.attempts) > 1 else each.name,
                    attempt.processes or NOTHING,
                    attempt.backend or NOTHING,
                    attempt.threads or NOTHING,
                    devices(attempt) or NOTHING,
                    ", ".join(f"{name} {version}" for name, version in attempt.versions.items()) or NOTHING,
                    f"{attempt.parameters:,}" if attempt.parameters else NOTHING,
                ]
            )
    shown = rows if len(rows) <= 60 else [*rows[:30], *rows[-30:]]
    head = ["run", "processes", "backend", "threads each", "devices", "versions", "parameters"]
    more = f" The first and the last 30 of {len(rows)} starts." if len(shown) < len(rows) else ""
    yield table("Where it ran: a row for each start." + more, head, shown, words=True)
    for each in told:
        notes = dict.fromkeys(note for attempt in each.story.attempts for note in attempt.notes)
        if notes:
            of = f" of {each.name}" if len(told) > 1 else ""
            yield tag(
                "details",
                tag("summary", f"Notes at the start{of} ({len(notes)})"),
                tag("ul", *(tag("li", note) for note in list(notes)[:50])),
            )


def devices(attempt: Attempt) -> str:
    """Their names, each once, with how many of it there are."""
    names = attempt.devices
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def config_differences(told: Sequence[Told]) -> Markup:
    """What is not the same in all configs."""
    rows = [
        [path, *(value if len(value) <= _VALUE else f"{value[:_VALUE]}..." for value in values)]
        for path, values in differences(told)
    ]
    if not rows:
        return tag("p", "The configs are the same.")
    return table("Entries of the configs that differ", ["entry", *(each.name for each in told)], rows, words=True)


def commands(told: Sequence[Told]) -> Iterator[Markup]:
    """What repeats each run."""
    for each in told:
        if len(told) > 1:
            yield tag("h3", each.name)
        if each.command:
            yield tag("pre", each.command, class_="command")
        yield tag("p", each.command_note, class_="soft") if each.command_note else tag("span")
        numbers = _runs_of([a.processes for a in each.story.attempts if a.processes])
        if len(numbers) > 1:
            yield tag(
                "p",
                f"The run went on with other numbers of processes: {', then '.join(map(str, numbers))}. "
                "The command has those that the config names.",
                class_="soft",
            )


def latest(told: Told, name: str) -> float | None:
    """The last value of an evaluation's series."""
    series = told.story.evals.get(name)
    return series[-1][2] if series else number(told.story.end or {}, name)


def joined_with_headings(parts: Sequence[tuple[str, Sequence[Markup]]]) -> Markup:
    """Sections with their headings; without anything inside there is none."""
    return joined(
        tag("section", tag("h2", heading), "\n", joined(inside, "\n"), "\n") for heading, inside in parts if inside
    )
