"""Pictures that come twice are told, by their content."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import DataConfig
from lockstep.data import contents as looking
from lockstep.data.contents import duplicates
from lockstep.data.picture_set import Files
from lockstep.data.sources import load
from lockstep.distributed.world import World
from tests.data.test_division import TWICE, told, write

ALONE = World.single()


def test_what_is_in_both_and_under_several_classes_is_named(tmp_path: Path) -> None:
    write(tmp_path, TWICE)
    both, several = told(ALONE, str(tmp_path))
    assert both == (
        "note: 2 of 3 images to validate on are among those to train on as well, by their content, so the accuracy "
        f"flatters: {tmp_path}/val/ant/x.png = {tmp_path}/train/ant/1.png; {tmp_path}/val/bee/z.png = "
        f"{tmp_path}/train/bee/2.png"
    )
    assert several == (
        f"note: 1 image(s) stand under several classes: {tmp_path}/train/ant/1.png (ant) and "
        f"{tmp_path}/train/bee/1.png (bee)"
    )


def test_where_nothing_comes_twice_nothing_is_said_and_few_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in (1, 2):
        write(tmp_path, {f"train/ant/{i}.png": bytes(2 * i), f"val/ant/{i}.png": bytes(2 * i + 1)})
    monkeypatch.setattr(Files, "read", None)
    assert told(ALONE, str(tmp_path)) == []


def test_large_sets_are_looked_through_on_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, TWICE)
    assert told(ALONE, str(tmp_path), "never") == []
    monkeypatch.setattr(looking, "_AT_ONCE", 7)
    assert told(ALONE, str(tmp_path)) == []
    assert len(told(ALONE, str(tmp_path), "always")) == 2
    digits = load(DataConfig(), tmp_path, 0, ALONE)
    assert duplicates(*digits, "always", ALONE) == []


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_groups_are_those_of_a_dictionary(pairs: list[tuple[int, int]]) -> None:
    by_hand: dict[tuple[int, int], list[int]] = {}
    for sample, pair in enumerate(pairs):
        by_hand.setdefault(pair, []).append(sample)
    found = looking._groups(np.array(pairs, np.int64), np.arange(len(pairs)))
    assert sorted(found) == sorted(group for group in by_hand.values() if len(group) > 1)
