"""Mixup and CutMix: the distributions of their draws, a loop by hand over whole batches, and any number of ranks."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.augment import Augment, Mixing, pairs, symmetric_beta
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import Batch, TrainLoader, reader
from lockstep.data.order import Order, micro_batches, slices
from lockstep.distributed.world import World
from lockstep.randomness import uniform_np

SAMPLES, BATCH, CLASSES = 41, 11, 4  # pairs straddle shares, a batch's last sample is alone; a last batch of 8
DRAWS = np.arange(100_000)
MIX = Mixing(5, CLASSES, mixup=0.4, cutmix=1.0)
AUGMENT = Augment((0.5, 0.4), (0.2, 0.3), 5, crop_padding=1, flip=True)


def images() -> ArraySet:
    pixels = np.random.default_rng(0).integers(0, 256, (SAMPLES, 2, 7, 6), dtype=np.uint8)
    labels = np.arange(SAMPLES) % CLASSES
    return ArraySet("small", tuple("abcd"), (0.5, 0.4), (0.2, 0.3), (pixels,), labels, "small")


def loader(rank: int, size: int, mixing: Mixing | None = MIX, accumulate: int = 1, exact: int = 0) -> TrainLoader:
    world, data = replace(World.single(), rank=rank, size=size), images()
    order = Order(SAMPLES, BATCH, 5)
    return TrainLoader(data, order, AUGMENT, world, reader(data, world.device), accumulate, exact, mixing=mixing)


def whole(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of all ranks of a step, in the order of the global batch."""
    parts = []
    for batch in batches:
        sizes = [piece.size for piece in batch.shards]
        cut = zip(batch.images.split(sizes), batch.labels.split(sizes), strict=True) if sizes else ()
        parts += [(piece.rows.start, *each) for piece, each in zip(batch.shards, cut, strict=True) if piece.size]
    parts.sort(key=lambda part: part[0])
    return torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts])


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 1.0, 2.0, 8.0])
def test_lambda_has_the_moments_of_its_beta_distribution(alpha: float) -> None:
    drawn = symmetric_beta(alpha, uniform_np(1, DRAWS), uniform_np(2, DRAWS))
    spread = 1 / (4 * (2 * alpha + 1))  # variance, and the fourth moment about the mean
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))
    assert abs(drawn.mean() - 0.5) < 5 * math.sqrt(spread / len(drawn))
    assert abs(drawn.var() - spread) < 5 * math.sqrt((fourth - spread**2) / len(drawn))
    assert abs(((drawn - 0.5) ** 4).mean() - fourth) < 5 * 0.25**2 / math.sqrt(len(drawn))
    assert np.array_equal(drawn * 2**16, np.rint(drawn * 2**16))
    assert drawn.min() >= 0
    assert drawn.max() <= 1


def test_how_many_are_mixed_and_by_what() -> None:
    mix = Mixing(1, 2, mixup=1.0, cutmix=1.0)
    drawn = mix.drawn(DRAWS, 32, 32, 0)
    blended, boxed = drawn.blend < 1, (drawn.box[:, 1] > drawn.box[:, 0]) & (drawn.box[:, 3] > drawn.box[:, 2])
    assert not (blended & boxed).any()
    assert abs(blended.mean() - 0.5) < 0.01
    assert abs(boxed.mean() - 0.5) < 0.04  # of those some have a box without a pixel
    assert np.array_equal(drawn.label[blended], drawn.blend[blended])
    area = (drawn.box[:, 1] - drawn.box[:, 0]) * (drawn.box[:, 3] - drawn.box[:, 2]) / 1024
    assert np.array_equal(drawn.label[~blended], 1 - area[~blended])
    later = mix.drawn(DRAWS, 32, 32, 1)
    assert abs(np.corrcoef(drawn.label, later.label)[0, 1]) < 0.02
    cut = Mixing(1, 2, cutmix=1.0).drawn(DRAWS, 64, 64, 0)
    centre = (cut.box[:, 0] + cut.box[:, 1]) / 2
    assert abs(centre.mean() - 31.5) < 0.2  # of pixels 0 to 63
    assert cut.box.min() >= 0
    assert cut.box.max() <= 64
    # a box that is not cut off at the edge has the area that lambda asked for, on average half of the image's
    assert 0.25 < 1 - cut.label.mean() < 0.5


@given(count=st.integers(1, 200), accumulate=st.integers(1, 9), size=st.integers(1, 9), exact=st.booleans())
def test_a_rank_reads_its_own_samples_and_one_more_at_each_end(
    count: int, accumulate: int, size: int, exact: bool
) -> None:
    seen: list[int] = []
    for rank in range(size):
        world = replace(World.single(), rank=rank, size=size)
        pieces = slices(count, accumulate, world) if exact else micro_batches(count, accumulate, world)
        found = pairs(pieces, count)
        seen += found.own.tolist()
        assert len(set(found.positions)) == len(found.positions)
        assert len(found.positions) - len(found.own) <= 2 * len(pieces)
        partners = found.positions[found.partner]
        alone = partners == found.own
        assert (partners[~alone] == (found.own ^ 1)[~alone]).all()
        assert set(found.own[alone]) <= ({count - 1} if count % 2 else set())
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("mixing", [MIX, replace(MIX, cutmix=0.0), replace(MIX, mixup=0.0)])
def test_a_loop_by_hand_over_whole_batches_gives_the_same(mixing: Mixing) -> None:
    data, order, mixed = images(), Order(SAMPLES, BATCH, 5), 0
    plain = Augment(data.mean, data.std, 5, crop_padding=1, flip=True)
    for epoch in range(2):
        for t, batch in enumerate(loader(0, 1, mixing).epoch(epoch)):
            ids = order.step(epoch, t)
            pixels, labels = data.read(ids)
            x = plain(pixels, torch.from_numpy(ids), epoch).double().numpy()
            y = np.eye(CLASSES)[labels.numpy()]
            for p in range(len(ids)):
                q = p + 1 if p % 2 == 0 else p - 1
                image, soft = x[p], y[p]
                if q < len(ids):
                    drawn = mixing.drawn(np.array([t * BATCH + p - p % 2]), 7, 6, epoch)
                    blend, (top, bottom, left, right), part = drawn.blend[0], drawn.box[0], drawn.label[0]
                    image = blend * x[p] + (1 - blend) * x[q]
                    image[:, top:bottom, left:right] = x[q][:, top:bottom, left:right]
                    soft = part * y[p] + (1 - part) * y[q]
                    mixed += part < 1
                np.testing.assert_allclose(batch.images[p].numpy(), image, rtol=0, atol=2e-6)
                np.testing.assert_allclose(batch.labels[p].numpy(), soft, rtol=0, atol=1e-7)
    assert mixed > 30


@pytest.mark.parametrize("way", [{}, {"accumulate": 3}, {"exact": 5}, {"exact": 11}])
def test_the_same_bits_on_any_number_of_ranks_however_a_batch_is_cut(way: dict[str, Any]) -> None:
    for epoch in range(2):
        alone = [whole([batch]) for batch in loader(0, 1).epoch(epoch)]
        for n in (1, 2, 3, 5):
            ranks = [list(loader(rank, n, **way).epoch(epoch)) for rank in range(n)]
            for step, (pixels, labels) in enumerate(alone):
                theirs = whole([rank[step] for rank in ranks])
                assert torch.equal(theirs[0], pixels), (n, step)
                assert torch.equal(theirs[1], labels), (n, step)
        later = next(iter(loader(1, 3, **way).epoch(epoch, 2)))
        assert torch.equal(later.images, list(loader(1, 3, **way).epoch(epoch))[2].images)


def test_what_is_mixed_is_said() -> None:
    assert MIX.note == "mixup 0.4 and CutMix 1 mix pairs of neighbours in the global batch"
