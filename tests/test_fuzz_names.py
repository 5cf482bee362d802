"""Strangers' names through every place; the rest of it is `python -m tests.fuzz_names`."""

from collections.abc import Callable
from unittest import mock

import pytest

from tests.fuzz_names import PLACES, problems


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_strangers_name_is_harmless_wherever_it_leaves_the_program(place: str) -> None:
    assert problems(place, 1) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "function", "instead", "found"),
    [
        ("show", "lockstep.errors._visible", str, "stdout has"),
        ("predict --format csv", "lockstep.commands.predict.cell", str, "has the formulas"),
        (
            "predict --sort-into",
            "lockstep.commands.predict.class_folders",
            lambda names: dict(zip(names, names, strict=True)),
            "else",
        ),
        ("report", "lockstep.commands.report.page.html", lambda _, data: str(data), "tag"),
    ],
)
def test_a_place_that_shows_a_name_as_it_is_is_found(
    place: str, function: str, instead: Callable[..., object], found: str
) -> None:
    with mock.patch(function, instead):
        assert any(found in line for seed in range(20) for line in problems(place, seed))
