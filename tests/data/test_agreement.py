"""A user's own sets: drawn alike on every rank, compared, and refused by name where they can't be used."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, random_split

from lockstep.config import DataConfig
from lockstep.data.readers import streaming
from lockstep.data.sources import load
from lockstep.errors import UserError
from lockstep.processes.world import World
from tests.ranks import run_ranks

ALONE = World.single()


class Numbered(Dataset[tuple[Tensor, Any]]):
    """The image holds the sample's number, the label is what it is told."""

    classes: tuple[str, ...] = ("a", "b", "c")

    def __init__(self, labels: Any = None, count: int = 30) -> None:
        self.labels, self.count = labels, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return torch.full((1, 2, 2), float(index)), index % 3 if self.labels is None else self.labels


def drawn() -> Any:
    """By generators that nobody has seeded: torch's, numpy's and Python's."""
    train, val = random_split(Numbered(), [20, 10])
    order = np.random.permutation(20)[: 15 + random.randrange(2)].tolist()
    return Subset(train, order), val


def by_process() -> Any:
    """By what differs from process to process."""
    order = np.random.default_rng(os.getpid()).permutation(30).tolist()
    return Subset(Numbered(), order[:20]), Subset(Numbered(), order[20:])


def by_process_in_arrays() -> Any:
    images = torch.full((4, 1, 2, 2), float(os.getpid()))
    return (torch.zeros(4, 1, 2, 2), torch.arange(4)), (images, torch.arange(4))


def fraction() -> Any:
    return Numbered(1.7), Numbered()


def one_hot() -> Any:
    return Numbered(torch.tensor([0, 1, 0])), Numbered()


def whole_tensor() -> Any:
    return Numbered(torch.tensor([2])), Numbered(np.int32(1))


def one_hot_targets() -> Any:
    train = Numbered()
    train.classes = ()
    train.targets = np.eye(3)  # type: ignore[attr-defined]
    return train, train


class Endless(IterableDataset[tuple[Tensor, int]]):
    classes = ("a", "b")

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield torch.zeros(1, 2, 2), 0


def iterable() -> Any:
    return Endless(), Endless()


def sets(factory: Any, world: World = ALONE) -> Any:
    return load(DataConfig(dataset=f"{__name__}:{factory.__name__}"), Path("unused"), 0, world)


def everything(world: World) -> dict[str, Any]:
    torch.manual_seed(world.rank)
    np.random.seed(world.rank)
    random.seed(world.rank)
    before = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(world.rank)
    np.random.seed(world.rank)
    torch.manual_seed(world.rank)
    train, val = sets(drawn, world)
    found = {
        "drawn": [each.read(np.arange(len(each)), None)[0][:, 0, 0, 0].tolist() for each in (train, val)],
        "left alone": (random.random(), np.random.rand(), torch.rand(1).item()) == before,
    }
    for factory in (by_process, by_process_in_arrays):
        try:
            sets(factory, world)
        except UserError as error:
            found[factory.__name__] = error.message
    return found


def test_sets_are_drawn_alike_on_any_number_of_ranks_and_others_are_refused() -> None:
    alone, first, second = everything(ALONE), *run_ranks(everything, 2)
    assert alone["drawn"] == first["drawn"] == second["drawn"]
    train, val = first["drawn"]
    assert not set(train) & set(val)
    for rank in (alone, first, second):
        assert rank["left alone"], "a user's generators go on as they were"
    assert "by_process" not in alone
    for rank in (first, second):
        assert f"{__name__}:by_process/train is not the same set on all ranks: 20 samples" in rank["by_process"]
        assert "by_process_in_arrays/val is not the same set" in rank["by_process_in_arrays"]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (fraction, r"train: sample 0 has the label 1\.7, which is no class number"),
        (one_hot, r"train: sample 0 has the label a Tensor, shape \[3\], which is no class number"),
        (one_hot_targets, r"`targets` are float64 \[3, 3\], not class numbers"),
        (iterable, r"train is an IterableDataset \(Endless\)"),
    ],
)
def test_what_is_no_labelled_sample_is_named(factory: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sets(factory)[0].read(np.array([0]), None)


def test_a_label_may_be_an_integer_of_any_kind() -> None:
    train, val = sets(whole_tensor)
    assert [each.read(np.array([0]), None)[1].tolist() for each in (train, val)] == [[2], [1]]


def test_a_set_that_no_worker_can_be_given_is_named() -> None:
    train, _ = sets(drawn)
    object.__setattr__(train, "dataset", lambda: None)  # a function without a name
    with pytest.raises(UserError, match="train can't be handed to worker processes"):
        next(streaming(train, torch.device("cpu"), 1)(iter([(np.arange(2), 0)])))
