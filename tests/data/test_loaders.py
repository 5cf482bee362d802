"""Who gets which samples, and that both loaders bring the same ones."""

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lockstep as ls
from lockstep.config.fields import with_values
from lockstep.config.recipes import recipe
from lockstep.data import loaders as readers
from lockstep.data.augment import Augment
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import Batch, EvalLoader, TrainLoader, reader, resident, several_at_once, streaming
from lockstep.data.order import Order, micro_batches
from lockstep.distributed.loader_workers import running
from lockstep.distributed.world import World, shard_of
from lockstep.errors import UserError
from lockstep.training import assemble

CPU = torch.device("cpu")
AUGMENT = Augment((0.5,), (0.2,), 7, crop_padding=1, flip=True)


def pretend(rank: int, size: int) -> World:
    return World(rank, size, rank, size, CPU, "none")


def numbered(n: int = 23) -> ArraySet:
    """The label is the sample id."""
    pixels = np.random.default_rng(0).integers(0, 256, (n, 1, 4, 4), dtype=np.uint8)
    return ArraySet("numbered", tuple(map(str, range(n))), (0.5,), (0.2,), (pixels,), np.arange(n), "numbered")


@dataclass(frozen=True)
class Files:
    """A set that is no array, with a bad sample; its label says which process read it."""

    name: str = "files"
    classes: tuple[str, ...] = ("a",)
    shape: tuple[int, int, int] = (1, 4, 4)
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.2,)
    fingerprint: str = "files"
    bad: int = -1

    def __len__(self) -> int:
        return 23

    def read(self, ids: np.ndarray, epoch: int | None) -> tuple[Tensor, Tensor]:
        if self.bad in ids:
            raise UserError(f"img/{self.bad}.png is truncated (sample {self.bad})", "Replace the file.")
        images = torch.from_numpy(ids.astype(np.uint8))[:, None, None, None].expand(-1, 1, 4, 4)
        return images.clone(), torch.full((len(ids),), os.getpid())


def train_loader(world: World, read: readers.Read, accumulate: int = 1, batch: int = 6) -> TrainLoader:
    images = numbered()
    return TrainLoader(images, Order(len(images), batch, 1), AUGMENT, world, read, accumulate)


def same(one: Batch, other: Batch) -> bool:
    fields = ("shards", "epoch", "step", "samples", "count")
    return (
        torch.equal(one.images, other.images)
        and torch.equal(one.labels, other.labels)
        and np.array_equal(one.all_ids, other.all_ids)
        and all(getattr(one, name) == getattr(other, name) for name in fields)
    )


@given(count=st.integers(1, 300), accumulate=st.integers(1, 12), size=st.integers(1, 9))
def test_micro_batches_have_the_same_members_on_any_number_of_ranks(count: int, accumulate: int, size: int) -> None:
    ranks = [micro_batches(count, accumulate, pretend(rank, size)) for rank in range(size)]
    cuts = min(count, accumulate)
    assert {len(pieces) for pieces in ranks} == {cuts}, "ranks must pass through the model equally often"
    for m in range(cuts):
        members = [row for pieces in ranks for row in range(count)[pieces[m].rows]]
        assert members == list(range(count)[shard_of(count, m, cuts)])
        sizes = [pieces[m].size for pieces in ranks]
        assert max(sizes) - min(sizes) <= 1
    keys = [piece.key for pieces in ranks for piece in pieces]
    assert len(set(keys)) == len(keys), "each piece has dropout draws of its own"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_an_epoch_brings_each_sample_once(size: int, accumulate: int) -> None:
    images = numbered()
    epochs = [
        list(train_loader(pretend(rank, size), resident(images, CPU), accumulate).epoch(2)) for rank in range(size)
    ]
    seen = sorted(label for epoch in epochs for batch in epoch for label in batch.labels.tolist())
    assert seen == list(range(23))
    for rank in epochs:
        assert [batch.count for batch in rank] == [6, 6, 6, 5]
        assert [batch.step for batch in rank] == [8, 9, 10, 11]
        assert [batch.samples for batch in rank] == [46, 52, 58, 64]
        assert all(
            sum(piece.size for piece in batch.shards) == len(batch.images) == len(batch.labels) for batch in rank
        )
    for batches in zip(*epochs, strict=True):
        assert all(np.array_equal(batch.all_ids, batches[0].all_ids) for batch in batches)
        pieces = [batch.labels.split([piece.size for piece in batch.shards]) for batch in batches]
        in_order = [label for micro in zip(*pieces, strict=True) for piece in micro for label in piece.tolist()]
        assert in_order == batches[0].all_ids.tolist(), "micro-batch by micro-batch, rank by rank"


def test_a_loader_used_like_torchs_says_how_an_epoch_is_asked_for() -> None:
    train, _ = ls.loaders("digits", World.single(), batch_size=64, workers=0)
    uses: list[Callable[[], object]] = [lambda: next(iter(train)), lambda: train.set_epoch(1)]
    for use in uses:
        with pytest.raises(UserError, match="epoch by epoch") as refused:
            use()
        assert "for batch in loader.epoch(e)" in refused.value.remedy


def test_an_epoch_can_start_at_any_step() -> None:
    loader = train_loader(pretend(1, 3), resident(numbered(), CPU), 2)
    whole = list(loader.epoch(1))
    for start in range(len(loader) + 1):
        rest = list(loader.epoch(1, start))
        assert len(rest) == len(whole) - start
        assert all(same(a, b) for a, b in zip(rest, whole[start:], strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_brings_what_the_resident_loader_does(workers: int) -> None:
    expected = train_loader(pretend(1, 2), resident(numbered(), CPU))
    loader = train_loader(pretend(1, 2), streaming(numbered(), CPU, workers))
    first = loader.epoch(0)
    assert same(next(first), next(expected.epoch(0)))
    del first  # left in the middle, with answers still under way
    for epoch in (0, 1):
        assert all(same(a, b) for a, b in zip(loader.epoch(epoch), expected.epoch(epoch), strict=True))
    assert loader.wait_ms > 0


def test_workers_stay_and_their_errors_reach_the_user_as_they_are() -> None:
    read = streaming(Files(bad=17), CPU, 2)

    def processes(ids: Iterable[int]) -> set[int]:
        answers = read((np.array([i]), None) for i in ids)
        return {int(label) for _, labels, _ in answers for label in labels}

    assert processes(range(6)) <= {pid for _, pid in running()}
    before = {pid for _, pid in running()}
    assert len(before) == 2
    assert os.getpid() not in before
    assert processes(range(6, 12)) <= before
    with pytest.raises(UserError) as caught:
        processes(range(12, 20))
    assert caught.value.message == "img/17.png is truncated (sample 17)", "no traceback of a worker around it"
    assert caught.value.remedy == "Replace the file."
    assert processes(range(4)) <= before == {pid for _, pid in running()}, "usable after an error"
    held = weakref.ref(caught.value)
    del caught
    assert held() is None, "a cycle around the error would hold the workers, and collecting it takes seconds"
    with pytest.raises(UserError, match="sample 17"):  # nor without workers
        list(streaming(Files(bad=17), CPU, 0)([(np.array([17]), None)]))


def test_a_loader_left_in_the_middle_is_let_go_at_once() -> None:
    """A cycle would wait for the collector, which shuts queues before workers and then waits 5 s for each of these."""
    loader = train_loader(pretend(0, 1), streaming(numbered(), CPU, 1), batch=2)
    next(loader.epoch(0))
    held = weakref.ref(loader.order)
    gc.disable()
    try:
        del loader
        assert held() is None
    finally:
        gc.enable()


@given(samples=st.integers(1, 60), size=st.integers(1, 9), batch=st.integers(1, 70))
def test_evaluation_cuts_the_set_alike_on_any_number_of_ranks(samples: int, size: int, batch: int) -> None:
    images = numbered(samples)
    plain = Augment((0.5,), (0.2,))
    parts = [EvalLoader(images, plain, pretend(rank, size), resident(images, CPU), batch) for rank in range(size)]
    found = [(chunk, labels.tolist()) for part in parts for chunk, _, labels in part]
    alone = EvalLoader(images, plain, World.single(), resident(images, CPU), batch)
    assert found == [(chunk, labels.tolist()) for chunk, _, labels in alone]
    assert [label for _, labels in found for label in labels] == list(range(samples))
    assert all(len(labels) <= batch for _, labels in found)
    assert {part.chunks for part in parts} == {len(found)}


def test_a_set_that_is_no_array_goes_through_workers() -> None:
    with pytest.raises(UserError, match="--loader resident: the images of files are no array"):
        reader(Files(), CPU, "resident")
    pixels, labels, _ = next(reader(Files(), CPU, "auto", 0)([(np.array([3]), 0)]))
    assert pixels.unique().tolist() == [3]
    assert labels.tolist() == [os.getpid()]


def test_steps_are_asked_for_no_earlier_than_needed() -> None:
    """A huge epoch must not be laid out before its first step."""
    asked = []

    def read(requests: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for ids, _ in requests:
            asked.append(len(ids))
            yield torch.zeros(len(ids), 1, 4, 4, dtype=torch.uint8), torch.zeros(len(ids)), torch.from_numpy(ids)

    loader = TrainLoader(numbered(), Order(10**12, 8192, 0), AUGMENT, World.single(), read)
    batch = next(loader.epoch(0, start=10**8))
    assert batch.step == 10**8
    assert asked == [8192]


@given(items=st.lists(st.integers(), max_size=20), count=st.integers(0, 7))
def test_made_several_at_once_they_are_the_same_and_none_is_made_too_early(items: list[int], count: int) -> None:
    made: list[int] = []

    def making() -> Iterator[int]:
        for item in items:
            made.append(item)
            yield item

    taken = []
    for item in several_at_once(making(), count):
        taken.append(item)
        assert len(made) - len(taken) < max(1, count)
    assert taken == items


def test_a_reflection_wider_than_the_image_is_refused() -> None:
    config = with_values(recipe("digits"), {"crop_fill": "reflect", "crop_padding": 8})
    train_set, _ = assemble.load_data(config, World.single())
    with pytest.raises(UserError, match="8x8 have no 8 pixels"):
        assemble.train_loader(config, train_set, World.single())
    assemble.train_loader(with_values(config, {"crop_padding": 7}), train_set, World.single())


@dataclass(frozen=True)
class Drawing(Files):
    """Its images say what their draws are keyed by."""

    def read(self, ids: np.ndarray, epoch: int | None, draws: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        images, _ = super().read(ids if draws is None else draws, epoch)
        return images, torch.from_numpy(ids)


def test_a_sample_that_comes_again_has_its_pixels_and_draws_of_its_own() -> None:
    again = np.array([3, 3 + 23, 22 + 46])
    drawn = Augment((0.5,), (0.2,), 7, crop_padding=3, flip=True)
    for read in (resident(numbered(), CPU), streaming(numbered(), CPU, 0)):
        images, labels, numbers = next(iter(read([(again, 0)])))
        assert labels.tolist() == [3, 3, 22]
        assert torch.equal(images[0], images[1])
        assert numbers.tolist() == again.tolist()
        seen = drawn(images, numbers, 0)
        assert not torch.equal(seen[0], seen[1])
    images, labels, _ = next(iter(streaming(Drawing(), CPU, 0)([(again, 0)])))
    assert images[:, 0, 0, 0].tolist() == again.tolist()
    assert labels.tolist() == [3, 3, 22]
    assert next(iter(streaming(Files(), CPU, 0)([(again, 0)])))[0][:, 0, 0, 0].tolist() == [3, 3, 22]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    width=st.integers(1, 40),
    dtype=st.sampled_from([np.uint8, np.float32]),
)
@settings(max_examples=60)
def test_requests_read_together_are_those_read_alone(sizes: list[int], width: int, dtype: type) -> None:
    n = 97
    stored: np.ndarray = np.arange(n * width).reshape(n, 1, 1, width).astype(dtype)
    images = ArraySet("rows", ("a",), (0.0,), (1.0,), (stored,), np.arange(n), "rows")
    draw = np.random.default_rng(sum(sizes))
    requests = [(draw.integers(0, 3 * n, size), 4) for size in sizes]
    together = list(resident(images, CPU)(iter(requests)))
    assert len(together) == len(requests)
    for (numbers, _), (pixels, labels, ids) in zip(requests, together, strict=True):
        assert torch.equal(ids, torch.from_numpy(numbers))
        assert torch.equal(pixels, torch.from_numpy(stored[numbers % n]))
        assert torch.equal(labels, torch.from_numpy(numbers % n))
        aligned = dtype is np.uint8 or not len(numbers) or pixels.storage_offset() * 4 % 64 == 0
        assert aligned, "a kernel's result may depend on it"
