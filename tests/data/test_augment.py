"""Augmentation against a slow reference that works pixel by pixel, and its law: a sample is the same everywhere."""

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.data import augment as module
from lockstep.data.augment import Augment
from lockstep.randomness import integers_np, stream


@st.composite
def cases(draw: st.DrawFn) -> tuple[Augment, Tensor, Tensor, int]:
    channels, height, width = draw(st.sampled_from([1, 3])), draw(st.integers(3, 9)), draw(st.integers(3, 9))
    fill = draw(st.sampled_from(["zero", "reflect"]))
    flip = draw(st.sampled_from([{}, {"flip": True}, {"alternate_flip": True}]))
    augment = Augment(
        mean=(0.49, 0.48, 0.44)[:channels],
        std=(0.2, 0.25, 0.26)[:channels],
        seed=draw(st.integers(0, 2**40)),
        crop_padding=draw(st.integers(0, 4 if fill == "zero" else min(4, height - 1, width - 1))),
        crop_fill=fill,
        **flip,
        cutout=draw(st.integers(0, 6)),
        image_size=draw(st.sampled_from([0, 0, 7])),
    )
    ids = draw(st.lists(st.integers(0, 2**45), min_size=1, max_size=9, unique=True))
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    images = generator.integers(0, 256, (len(ids), channels, height, width), dtype=np.uint8)
    return augment, torch.from_numpy(images), torch.tensor(ids), draw(st.integers(0, 50))


def mirror(at: int, size: int) -> int:
    return -at if at < 0 else 2 * (size - 1) - at if at >= size else at


def slowly(augment: Augment, image: np.ndarray, sample: int, epoch: int) -> np.ndarray:
    """uint8 [C, H, W] to float64 [C, H, W], one pixel at a time; without the resize."""

    def draw(word: str, n: int) -> int:
        return int(integers_np(stream(augment.seed, word, epoch), np.array([sample]), n)[0])

    channels, height, width = image.shape
    pad = augment.crop_padding
    y, x = (draw("crop-y", 2 * pad + 1) - pad, draw("crop-x", 2 * pad + 1) - pad) if pad else (0, 0)
    mirrored = augment.flip and draw("flip", 2) == 1
    if augment.alternate_flip:
        first = int(integers_np(stream(augment.seed, "flip", 0), np.array([sample]), 2)[0])
        mirrored = (first + epoch) % 2 == 1
    top = draw("cutout-y", height) - augment.cutout // 2
    left = draw("cutout-x", width) - augment.cutout // 2
    out = np.zeros(image.shape)
    for row in range(height):
        for column in range(width):
            from_row, from_column = row + y, (width - 1 - column if mirrored else column) + x
            if augment.crop_fill == "reflect":
                from_row, from_column = (mirror(at, n) for at, n in ((from_row, height), (from_column, width)))
            inside = 0 <= from_row < height and 0 <= from_column < width
            cut = augment.cutout and top <= row < top + augment.cutout and left <= column < left + augment.cutout
            for channel in range(channels):
                pixel = image[channel, from_row, from_column] / 255 if inside else 0.0
                value = (pixel - augment.mean[channel]) / augment.std[channel]
                out[channel, row, column] = 0.0 if cut else value
    return out


@given(case=cases())
@settings(max_examples=50)
def test_it_is_what_the_slow_reference_makes(case: tuple[Augment, Tensor, Tensor, int]) -> None:
    augment, images, ids, epoch = case
    stored = images.clone()
    out = augment(images, ids, epoch)
    assert torch.equal(images, stored), "the stored images are not written to"
    assert out.dtype == torch.float32
    size = augment.image_size
    for position, sample in enumerate(ids.tolist()):
        expected = torch.from_numpy(slowly(augment, images[position].numpy(), sample, epoch))
        if size:
            expected = F.interpolate(expected[None], size=(size, size), mode="bilinear", antialias=True)[0]
        torch.testing.assert_close(out[position].double(), expected, rtol=0, atol=2e-5)


@given(case=cases(), data=st.data())
@settings(max_examples=50)
def test_a_samples_bits_do_not_depend_on_its_batch(
    case: tuple[Augment, Tensor, Tensor, int], data: st.DataObject
) -> None:
    augment, images, ids, epoch = case
    whole = augment(images, ids, epoch)
    some = data.draw(st.lists(st.sampled_from(range(len(ids))), min_size=1, unique=True))
    assert torch.equal(augment(images[some], ids[some], epoch), whole[some])
    for position in range(len(ids)):
        alone = augment(images[position : position + 1], ids[position : position + 1], epoch)
        assert torch.equal(alone[0], whole[position])


@given(case=cases(), dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=50)
def test_rows_and_pixels_are_cropped_alike(case: tuple[Augment, Tensor, Tensor, int], dtype: torch.dtype) -> None:
    """A CPU copies rows, any other device gathers pixels."""
    augment, images, ids, epoch = case
    typed = images.to(dtype)
    pixels = augment._crop_pixels(typed, ids, epoch)
    if dtype == torch.bfloat16:  # numpy has no such type
        plain = replace(augment, cutout=0, image_size=0)
        assert torch.equal(plain(typed, ids, epoch), pixels)
    else:
        assert torch.equal(augment._crop_rows(typed, ids, epoch), pixels)


@given(case=cases())
@settings(max_examples=50)
def test_large_images_one_by_one_have_the_bits_of_a_batch(case: tuple[Augment, Tensor, Tensor, int]) -> None:
    augment, images, ids, number = case
    for layout in (torch.contiguous_format, torch.channels_last):
        stored = images.to(memory_format=layout)
        for epoch in (number, None):
            together = augment(stored, ids, epoch)
            with mock.patch.object(module, "_LARGE", 1):
                assert torch.equal(augment(stored, ids, epoch), together)
    assert torch.equal(images, case[1])


@given(case=cases())
@settings(max_examples=50)
def test_evaluation_draws_nothing(case: tuple[Augment, Tensor, Tensor, int]) -> None:
    augment, images, ids, _ = case
    plain = Augment(augment.mean, augment.std, image_size=augment.image_size)
    assert torch.equal(augment(images, ids, None), plain(images, ids, 3))
    assert torch.equal(augment(images, ids, None), augment(images, ids + 1, None))


def drawn(seed: int, epoch: int, **options: Any) -> Tensor:
    """500 samples of one image, of which every pixel is different."""
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).expand(500, 1, 8, 8)
    return Augment((0.0,), (1.0,), seed, **options)(image, torch.arange(500), epoch)


@pytest.mark.parametrize("options", [{"crop_padding": 2}, {"flip": True}, {"cutout": 3}], ids=str)
def test_seed_epoch_and_sample_each_change_the_draws_and_are_not_added_up(options: dict[str, int]) -> None:
    assert torch.equal(drawn(0, 0, **options), drawn(0, 0, **options))
    kinds = [drawn(seed, epoch, **options) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for i, one in enumerate(kinds):
        for other in kinds[:i]:
            changed = (one != other).flatten(1).any(1).float().mean().item()
            assert changed > 0.4, "about half of all samples differ in a flip, nearly all in the others"
    assert len(kinds[0].flatten(1).unique(dim=0)) > 1


def test_draws_are_even() -> None:
    mirrored = (drawn(0, 0, flip=True)[:, 0, 0, 0] * 255).round() == 8
    assert 0.42 < mirrored.float().mean().item() < 0.58
    corners = drawn(0, 0, crop_padding=1)[:, 0, 4, 4]  # one of nine pixels, by the offset
    values, counts = corners.unique(return_counts=True)
    assert len(values) == 9
    assert counts.min() > 500 / 9 * 0.6
    rows = (drawn(0, 0, cutout=1) == 0).flatten(1).int().argmax(1)
    assert len(rows.unique()) == 64
    assert ((drawn(0, 0, cutout=1) == 0).flatten(1).sum(1) == 1).all()


def test_normalised_images_are_taken_as_they_are() -> None:
    images = torch.randn(4, 3, 6, 6)
    augment = Augment((0.5,) * 3, (0.2,) * 3, flip=True)
    out = augment(images, torch.arange(4), 0)
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(-1)) for a, b in zip(out, images, strict=True))
    assert torch.equal(augment(images, torch.arange(4), None), images)
    stored = images.clone()
    replace(augment, crop_padding=1, cutout=3)(images, torch.arange(4), 0)
    assert torch.equal(images, stored)


def test_an_empty_share_stays_empty() -> None:
    augment = Augment((0.5,), (0.2,), crop_padding=1, flip=True, cutout=2)
    out = augment(torch.empty(0, 1, 6, 6, dtype=torch.uint8), torch.empty(0, dtype=torch.int64), 0)
    assert out.shape == (0, 1, 6, 6)
    assert out.dtype == torch.float32


@pytest.mark.gpu
@given(case=cases())
@settings(max_examples=30)
def test_the_gpu_makes_the_same_bits(case: tuple[Augment, Tensor, Tensor, int]) -> None:
    augment, images, ids, epoch = case
    out = augment(images.cuda(), ids.cuda(), epoch).cpu()
    if augment.image_size:  # the resize sums in another order there
        torch.testing.assert_close(out, augment(images, ids, epoch), rtol=0, atol=1e-5)
    else:
        assert torch.equal(out, augment(images, ids, epoch))
