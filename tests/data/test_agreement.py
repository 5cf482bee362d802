"""A user's own sets: drawn alike on every rank, compared, and refused by name where they can't be used."""

import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, random_split

from lockstep.config import Config, DataConfig, Execution
from lockstep.config.execution import Law
from lockstep.data.loaders import streaming
from lockstep.data.sources import load
from lockstep.distributed import warm
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import load_data, loaders
from tests.ranks import run_ranks

ALONE = World.single()
Ranks = list[dict[str, Any]]


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


def by_rank() -> Any:
    """Shared out by the factory."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Subset(Numbered(), range(rank, 20, ranks)), Subset(Numbered(), range(20, 30))


def by_process_in_arrays() -> Any:
    images = torch.full((4, 1, 2, 2), float(os.getpid()))
    return (torch.zeros(4, 1, 2, 2), torch.arange(4)), (images, torch.arange(4))


def made_once(data_dir: str) -> Any:
    """Too large to be made by two processes at once: the second one is killed, as by the kernel."""
    try:
        Path(data_dir, "mark").touch(exist_ok=False)
    except FileExistsError:
        os.kill(os.getpid(), signal.SIGKILL)
    return Numbered(), Numbered()


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
    return load_data(Config(data=DataConfig(dataset=f"{__name__}:{factory.__name__}")), world)


def draws(world: World) -> dict[str, Any]:
    def next_draws(seeded: bool) -> tuple[float, ...]:
        if seeded:
            for seed in (torch.manual_seed, np.random.seed, random.seed):
                seed(world.rank)
        return random.random(), np.random.rand(), torch.rand(1).item()

    next_draws(seeded=True)
    after = next_draws(seeded=False)
    next_draws(seeded=True)
    train, val = sets(drawn, world)
    found: dict[str, Any] = {"left alone": next_draws(seeded=False) == after}
    found["drawn"] = [each.read(np.arange(len(each)), None)[0][:, 0, 0, 0].tolist() for each in (train, val)]
    for factory in (by_process, by_process_in_arrays, by_rank):
        try:
            sets(factory, world)
        except UserError as error:
            found[factory.__name__] = error.message
    return found


def test_sets_are_drawn_alike_on_any_number_of_ranks_and_others_are_refused(worlds: Ranks) -> None:
    alone, first, second = ranks = [rank["draws"] for rank in worlds]
    assert alone["drawn"] == first["drawn"] == second["drawn"]
    train, val = first["drawn"]
    assert not set(train) & set(val)
    for rank in ranks:
        assert rank["left alone"], "a user's generators go on as they were"
        assert f"{__name__}:by_process/train is not the same set in every process: 20 samples" in rank["by_process"]
        assert "by_process_in_arrays/val is not the same set" in rank["by_process_in_arrays"]
        assert "by_rank/train is not the same set on one process and on several: 20 samples" in rank["by_rank"]


def test_one_rank_calls_a_factory_at_another_time_so_that_what_follows_the_clock_is_seen() -> None:
    data, called = DataConfig(dataset=f"{__name__}:drawn"), []
    for rank in range(3):
        with mock.patch("lockstep.data.sources.time.sleep") as sleep:
            load(data, Path(), 0, replace(ALONE, rank=rank, size=3))
        called.append(sleep.called)
    assert called == [False, True, False]


@lru_cache(maxsize=3)
def kept(index: int) -> Tensor:
    return torch.full((1, 2, 2), 1.0 + index)


@lru_cache
def strength(brightness: int) -> float:
    return random.random()


def by_brightness(picture: Tensor) -> Tensor:
    """Draws once for all pictures of a brightness, by whichever comes first."""
    return (picture * strength(int(picture.float().mean()) // 8)).to(picture.dtype)


def by_itself(picture: Tensor) -> Tensor:
    return (picture * random.random() * torch.rand(())).to(picture.dtype)


class Reading(Numbered):
    """Its images depend on `how` they are read."""

    def __init__(self, how: str, labelled_by: int = 0) -> None:
        super().__init__(np.random.default_rng(labelled_by).integers(3, size=30).tolist())
        self.how, self.generator, self.cache = how, np.random.default_rng(0), dict[int, float]()
        self.pythons = random.Random()

    def seeded(self, index: int) -> random.Random:
        self.pythons.seed(index)
        return self.pythons

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image, label = super().__getitem__(index)
        label = label[index]
        match self.how:
            case "keyed":
                return image + np.random.rand() + random.random() + torch.rand(()), label
            case "own generator of each sample's":
                return image + random.Random(index).random() + self.seeded(index).random(), label
            case "own generator for a rare sample":
                return image + (self.generator.random() < 1e-9), label
            case "own generator":
                return image + (index == 2) * self.generator.normal(), label
            case "cache of draws":
                return image + self.cache.setdefault(index, random.random()), label
            case "cache that is written into":
                return kept(index).mul_(0.5), label
            case "labels":
                return image, (label + int(self.generator.integers(3))) % 3
            case "rank":
                return image + int(os.environ.get("RANK", "0")), label
        return image + np.random.default_rng(os.getpid()).normal(), label


def noise_and_process() -> Any:
    """Images that are others each time, and labels by the process: the one doesn't hide the other."""
    return Reading("own generator", os.getpid()), Numbered()


def reported(world: World) -> tuple[dict[str, list[str]], dict[str, str], list[str]]:
    """What is said of sets that are read otherwise, and of factories."""
    said, refused = {}, {}
    laws: dict[str, Law] = {"strict": "strict"}
    caches = "cache of draws", "cache that is written into"
    several = ("own generator", *caches, "labels", "process", "rank", "own generator for a rare sample")
    for how in ("keyed", "own generator of each sample's", *several):
        said[how], own = list[str](), Subset(Reading(how), range(30))
        load_data(Config(data=DataConfig(dataset="own")), world, (own, Reading("keyed")), said[how].append)
    for augment in (by_itself, by_brightness):
        data = DataConfig(dataset="digits", augment=(f"{__name__}:{augment.__name__}",))
        load_data(Config(data=data), world, report=said.setdefault(augment.__name__, []).append)
    for name, given in (
        ("by_process", by_process),
        ("by_process_in_arrays", by_process_in_arrays),
        ("noise_and_process", noise_and_process),
        ("strict", (Numbered(), Reading("process"))),
    ):
        execution = Execution(law=laws.get(name, "warn"))
        try:
            data = DataConfig(dataset=f"{__name__}:{given.__name__}" if callable(given) else "own")
            load_data(Config(data=data, execution=execution), world, None if callable(given) else given)
        except UserError as error:
            refused[name] = error.message
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loaders((Reading("own generator"), Reading("keyed")), world, batch_size=2)
    return said, refused, [each.filename for each in warned]


def test_what_is_not_the_same_in_every_process_is_said_on_any_number_of_them(worlds: Ranks) -> None:
    alone, first, second = (rank["reported"] for rank in worlds)
    assert alone[0] == first[0] == second[0]
    assert not alone[0].pop("keyed")
    assert not alone[0].pop("own generator of each sample's")
    assert not alone[0].pop("by_itself")
    (sentence,) = alone[0].pop("by_brightness")
    assert f"of digits/train with --augment {__name__}:by_brightness depends on what was read before it" in sentence
    assert (
        "own/train draws from a generator that goes on from sample to"
        in alone[0].pop("own generator for a rare sample")[0]
    )
    for how, (sentence,) in alone[0].items():
        assert "own/train depends on " in sentence
        assert ("on the process that reads it" in sentence) == (how == "process")
        assert ("on the rank of the process that reads it, or on their number" in sentence) == (how == "rank")
    assert (alone[2], first[2], second[2]) == ([__file__], [__file__], [])  # the file of the loop, not one of ours
    for _, refused, _ in (alone, first, second):
        assert "by_process/train is not the same set in every process: 20 samples" in refused["by_process"]
        assert "arrays/val is not the same set in every process: 4 samples" in refused["by_process_in_arrays"]
        assert "noise_and_process/train is not the same set in every process" in refused["noise_and_process"]
        assert "--law strict: metrics will differ" in refused["strict"]
        assert "own/val depends on the process" in refused["strict"]


def test_python_and_numpy_draw_alike_in_every_process(worlds: Ranks) -> None:
    assert [rank["noise"] for rank in worlds] == [worlds[0]["noise"]] * 3


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (fraction, r"train: sample 0 has the label 1\.7, which is no class number"),
        (one_hot, r"train: sample 0 has the label a Tensor, shape \[3\], which is no class number"),
        (one_hot_targets, r"its labels are float64 \[3, 3\], not class numbers"),
        (iterable, r"train is an IterableDataset \(Endless\)"),
    ],
)
def test_what_is_no_labelled_sample_is_named(factory: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sets(factory)[0].read(np.array([0]), None)


def test_a_label_may_be_an_integer_of_any_kind() -> None:
    train, val = sets(whole_tensor)
    assert [each.read(np.array([0]), None)[1].tolist() for each in (train, val)] == [[2], [1]]


def made_by_one(world: World, folder: str) -> int:
    config = Config(data=DataConfig(dataset=f"{__name__}:made_once"), execution=Execution(data_dir=folder))
    with pytest.warns(UserWarning, match="the data set was not compared: the process that made it again was killed"):
        train, _ = load_data(config, world)
    return len(train)


def test_a_set_that_only_one_process_can_make_is_not_compared(worlds: Ranks) -> None:
    assert worlds[0]["made by one"] == 30


def by_default() -> Any:
    """As the default dtype has it, which is the process's."""
    images = torch.zeros(4, 1, 1, 1, dtype=torch.float32) + float(torch.get_default_dtype() == torch.float64)
    return (images, torch.arange(4)), (images, torch.arange(4))


def with_another_default(world: World) -> list[int]:
    """A script sets it, then calls `ls.train` (the other process was forked before), or has a loop of its own."""
    assert warm.at_hand()
    torch.set_default_dtype(torch.float64)
    return [len(sets(by_default, world)[0]), len(loaders(f"{__name__}:by_default", world, batch_size=2)[0].images)]


def test_a_set_is_made_again_with_the_default_dtype_of_the_run_or_not_at_all(worlds: Ranks) -> None:
    assert worlds[0]["another default"] == [4, 4]


def everything(world: World, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "noise": [np.random.rand(), random.random()],
        "draws": draws(world),
        "reported": reported(world),
    }
    if world.size == 1:
        found |= {"made by one": made_by_one(world, folder), "another default": with_another_default(world)}
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """A rank alone, and two."""
    folder = str(tmp_path_factory.mktemp("once"))
    return [rank for n in (1, 2) for rank in run_ranks(everything, n, folder, timeout=240)]


def test_a_set_that_no_worker_can_be_given_is_named() -> None:
    train, _ = sets(drawn)
    object.__setattr__(train, "dataset", threading.Lock())
    with pytest.raises(UserError, match="train can't be handed to worker processes"):
        next(streaming(train, torch.device("cpu"), 1)(iter([(np.arange(2), 0)])))
