"""The most confident mistakes, with their pictures."""

import base64
from collections.abc import Iterator, Sequence

from lockstep.commands.report.classes import by_class
from lockstep.commands.report.runs import Told
from lockstep.commands.shared.markup import Markup, tag, trusted
from lockstep.commands.shared.page import table
from lockstep.inference.mistakes import Mistake

_SMALL = 64  # pixels of width up to which a picture is enlarged without smoothing


def sections(told: Sequence[Told]) -> Iterator[Markup]:
    """For each run, or why there are none."""
    for run, each in enumerate(told):
        found, whose = each.mistakes, f"{each.name}: the" if len(told) > 1 else "The"
        if found.why_not:
            yield tag("p", f"{whose} pictures are missing: {found.why_not}", class_=f"run run-{run}")
            continue
        said = f"{whose} {found.weights} weights take {found.wrong:,} of {found.images:,} images for another class"
        said += f" (top-1 {1 - found.wrong / max(1, found.images):.2%})"
        said += f". The {len(found.shown)} that they are surest of:" if found.shown else "."
        yield tag(
            "div",
            tag("p", said),
            _other_data(each),
            tag("ul", *map(_item, found.shown), class_="mistakes") if found.shown else None,
            _pairs(each),
            class_=f"run run-{run}",
        )


def _other_data(told: Told) -> Markup | None:
    """A line where the data that was found is not that of the run."""
    trained_on = next((a.data.get("fingerprint", "") for a in told.story.attempts[::-1]), "")
    if not trained_on or trained_on == told.mistakes.train_data:
        return None
    return tag("p", "The data that is here is not what the run was trained on.", class_="alarm")


def _item(mistake: Mistake) -> Markup:
    kind = "png" if mistake.picture.startswith(b"\x89PNG") else "jpeg"
    address = trusted(f"data:image/{kind};base64,{base64.b64encode(mistake.picture).decode()}")
    how = "photo" if mistake.width > _SMALL else None
    about = f"{mistake.label}, taken for {mistake.taken}"
    return tag(
        "li",
        tag("img", src=address, alt=f"Sample {mistake.sample}: {about}", class_=how),
        tag("strong", mistake.label),
        f" taken for {mistake.taken}, {mistake.confidence:.1%}",
        tag("div", f"sample {mistake.sample}", class_="soft"),
    )


def _pairs(told: Told) -> Markup | None:
    """Where the journal has no confusion matrix, as of more than a hundred classes."""
    scores = by_class(told.story.classes)
    if not told.mistakes.pairs or (scores is not None and scores.confusion is not None):
        return None
    return table(
        "Taken for another class most often", ["class", "taken for", "images"], told.mistakes.pairs, words=True
    )
