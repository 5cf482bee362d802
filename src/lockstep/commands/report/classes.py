"""What evaluation found by class, and which classes are taken for each other."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.commands.report.runs import Told
from lockstep.commands.report.values import counts, texts
from lockstep.commands.shared.markup import Markup, tag, trusted
from lockstep.commands.shared.page import table

_NUMBERED = 26  # classes up to which the confusion matrix is a table of numbers; beyond it is a picture
_ROWS, _PAIRS = 30, 10


@dataclass(frozen=True)
class ByClass:
    """A `classes` record that makes sense."""

    step: int
    classes: list[str]
    images: list[int]
    predicted: list[int]
    right: list[int]
    confusion: list[list[int]] | None

    @property
    def rows(self) -> list[tuple[str, int, float, float, float]]:
        """Class, images, precision, recall, F1; the lowest F1 first."""
        found = [
            (name, n, _ratio(r, p), _ratio(r, n), _ratio(2 * r, p + n))
            for name, n, p, r in zip(self.classes, self.images, self.predicted, self.right, strict=True)
        ]
        return sorted(found, key=lambda row: (row[1] == 0, row[4]))

    @property
    def pairs(self) -> list[tuple[str, str, int]]:
        """Class, what it was taken for, images; the most frequent first."""
        matrix = self.confusion or []
        found = [(row, k, n) for row, each in enumerate(matrix) for k, n in enumerate(each) if n and row != k]
        return [(self.classes[row], self.classes[k], n) for row, k, n in sorted(found, key=lambda p: -p[2])[:_PAIRS]]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def by_class(record: Mapping[str, Any] | None) -> ByClass | None:
    """The record, if its lists fit each other."""
    if record is None:
        return None
    names = texts(record, "classes")
    images, predicted, right = (counts(record, name) for name in ("images", "predicted", "right"))
    if not names or not len(names) == len(images) == len(predicted) == len(right):
        return None
    given = record.get("confusion")
    matrix = [counts({"": row}, "") for row in given] if isinstance(given, list) else []
    square = len(matrix) == len(names) and all(len(row) == len(names) for row in matrix)
    step = record.get("step")
    return ByClass(step if isinstance(step, int) else 0, names, images, predicted, right, matrix if square else None)


def sections(told: Sequence[Told]) -> Iterator[Markup]:
    """For each run that evaluated: scores, matrix, and the pairs that are confused most."""
    for run, each in enumerate(told):
        found = by_class(each.story.classes)
        if found is None:
            yield tag("p", f"{each.name}: the journal has no scores by class.", class_=f"run run-{run}")
            continue
        of = f" of {each.name}" if len(told) > 1 else ""
        yield tag(
            "div",
            tag("h3", each.name) if len(told) > 1 else None,
            tag("div", _scores(found, of), *_confusion(found, of), class_="beside"),
            class_=f"run run-{run}",
        )


def _scores(found: ByClass, of: str) -> Markup:
    rows = [[name, f"{n:,}", *(f"{value:.1%}" for value in values)] for name, n, *values in found.rows]
    head = ["class", "images", "precision", "recall", "F1"]
    caption = f"Scores by class{of} at step {found.step:,}, the lowest F1 first"
    if len(rows) <= _ROWS:
        return table(caption, head, rows)
    rest = tag(
        "details",
        tag("summary", f"the other {len(rows) - _ROWS} classes"),
        table("", head, rows[_ROWS:], label="More classes"),
    )
    return tag("div", table(f"{caption}: {_ROWS} of {len(rows)}", head, rows[:_ROWS]), rest)


def _confusion(found: ByClass, of: str) -> list[Markup]:
    if found.confusion is None:
        return [tag("p", f"The journal has no confusion matrix of {len(found.classes)} classes.", class_="soft")]
    size = len(found.classes)
    about = f"Confusion matrix{of}: images of the class of a row that were taken for the class of a column"
    drawn = _numbers(found, about) if size <= _NUMBERED else _picture(found, about)
    if not found.pairs:
        return [drawn, tag("p", "No image was taken for another class.")]
    caption = f"Taken for another class most often{of}"
    return [drawn, table(caption, ["class", "taken for", "images"], found.pairs, words=True)]


def _numbers(found: ByClass, about: str) -> Markup:
    matrix = found.confusion or []
    rows = []
    for row, (name, images) in enumerate(zip(found.classes, found.images, strict=True)):
        cells = (
            tag(
                "td",
                n or "",
                style=f"--share:{100 * _ratio(n, images):.0f}%",
                class_=" ".join(["right"] * (row == k) + ["dense"] * (2 * n > images)) or None,
            )
            for k, n in enumerate(matrix[row])
        )
        rows.append(tag("tr", tag("th", name, scope="row"), *cells))
    head = tag(
        "tr",
        tag("th", "class \N{RIGHTWARDS ARROW} taken for", scope="col"),
        *(tag("th", name, scope="col") for name in found.classes),
    )
    whole = tag("table", tag("caption", about), tag("thead", head), tag("tbody", *rows), class_="confusion")
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=about)


def _picture(found: ByClass, about: str) -> Markup:
    from PIL import Image

    matrix, size = found.confusion or [], len(found.classes)
    image = Image.new("LA", (size, size))  # black that is as dense as the share of the class is large
    image.putdata(
        [(0, round(255 * _ratio(n, found.images[row]) ** 0.5)) for row, each in enumerate(matrix) for n in each]
    )
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    address = trusted("data:image/png;base64," + base64.b64encode(out.getvalue()).decode())
    about += ". A dot is a pair of classes, in their order; the darker, the larger the part of the class (square root)."
    return tag("figure", tag("img", src=address, alt=about, class_="matrix"), tag("figcaption", tag("small", about)))
