"""Transforms by name: a sample looks the same everywhere, and the draws have the distribution of torchvision's own."""

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from lockstep.data import loaders as readers
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import Samples
from lockstep.data.transforms import Transforms, built, known, tried_transforms
from lockstep.errors import UserError

MEAN = (0.5, 0.4, 0.3)
# each of the named augmentations, and functions of one's own, that draw from every generator
SPECS = (
    "randaugment:2,9",
    "trivialaugmentwide",
    "autoaugment:cifar10",
    "augmix",
    "randomerasing:p=0.7,value=mean",
    "colorjitter:0.4,0.4,0.4",
    "randomresizedcrop:scale=(0.3,1)",
    "gaussianblur:3,p=0.5",
    "randomrotation:15",
    "tests.data.test_transforms:own",
)


def own(image: Tensor) -> Tensor:
    by = random.randint(0, 9) + int(np.random.randint(10)) + int(torch.randint(10, ()))
    return image.add_(by).roll(by, 1)


def makes_floats(image: Tensor) -> Tensor:
    return image / 255


def fails(image: Tensor) -> Tensor:
    raise ArithmeticError("of its own")


own_pipeline = v2.Compose([v2.RandomCrop(6), v2.RandomHorizontalFlip()])


def pictures(count: int, shape: tuple[int, int, int] = (3, 12, 9)) -> Tensor:
    """One picture, `count` times: what differs afterwards was drawn."""
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(np.repeat(image[None], count, 0))


def made(*specs: str, shape: tuple[int, int, int] = (3, 12, 9), seed: int = 3) -> Transforms:
    return Transforms(specs, seed, shape, MEAN[: shape[0]])


@pytest.mark.parametrize("spec", SPECS)
def test_a_sample_looks_the_same_in_any_batch_order_process_and_number_of_threads(spec: str) -> None:
    ids = np.array([5, 0, 2**40, 17, 3])
    transform, stored = made(spec, "colorjitter:0.2"), pictures(5)
    whole = transform(stored.clone(), ids, 4)
    torch.rand(3), random.random(), np.random.rand()
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    again = pickle.loads(pickle.dumps(transform))(stored.clone(), ids[::-1].copy(), 4).flip(0)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert torch.equal(again, whole)
    for row in range(5):
        torch.rand(row), random.random(), np.random.rand()
        assert torch.equal(transform(stored[row : row + 1].clone(), ids[row : row + 1], 4)[0], whole[row])
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])
    transform(stored.clone(), ids, 4)
    assert torch.equal(torch.get_rng_state(), before[0]), "the generators are put back"
    assert random.getstate() == before[1]
    assert str(np.random.get_state()) == str(before[2])
    assert (torch.get_num_threads(), whole.dtype, whole.shape) == (threads, torch.uint8, stored.shape)


@pytest.mark.parametrize("spec", SPECS)
def test_seed_epoch_id_and_place_each_change_the_draws(spec: str) -> None:
    ids, stored = np.arange(40), pictures(40)
    base = made(spec)(stored.clone(), ids, 0)
    kinds = {
        "epoch": made(spec)(stored.clone(), ids, 1),
        "seed": made(spec, seed=4)(stored.clone(), ids, 0),
        "id": made(spec)(stored.clone(), ids + 1, 0),
    }
    for name, other in kinds.items():
        changed = (base != other).flatten(1).any(1).float().mean().item()
        assert changed > 0.4, name  # a blur of one in two, and an identity now and then
    assert len(base.flatten(1).unique(dim=0)) > 8
    twice = made("randomhorizontalflip", "randomhorizontalflip")(stored.clone(), ids, 0)
    assert 0.2 < (twice != stored).flatten(1).any(1).float().mean() < 0.8, "one and the same draw would undo itself"


def test_a_sample_that_comes_again_has_draws_of_its_own() -> None:
    images = ArraySet("some", ("a",), MEAN, MEAN, (pictures(9).numpy(),), np.zeros(9, np.int64), "")
    transform = made("randaugment:2,9", "tests.data.test_transforms:own")
    answer, numbers = Samples(images, transform).read, np.array([2, 11, 20, 2])  # sample 2, thrice
    looks, labels = answer(numbers, 0)
    assert len(looks[:3].flatten(1).unique(dim=0)) == 3
    assert torch.equal(looks[0], looks[3])
    assert torch.equal(answer(np.array([20]), 0)[0][0], looks[2])
    assert torch.equal(answer(numbers, None)[0], pictures(4)), "evaluation sees it as it is"
    assert len(labels) == 4


@pytest.mark.parametrize(
    ("loader", "device", "expected"),
    [
        ("auto", "cpu", "resident"),
        ("auto", "cuda", "streaming"),
        ("resident", "cuda", "resident"),
        ("streaming", "cpu", "streaming"),
    ],
)
def test_beside_an_accelerator_workers_transform(
    loader: str, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = ArraySet("some", ("a",), MEAN, MEAN, (pictures(2).numpy(),), np.zeros(2, np.int64), "")
    monkeypatch.setattr(readers, "_fits", lambda *_: True)
    for name in ("resident", "streaming"):
        monkeypatch.setattr(readers, name, lambda *args, name=name: (name, args[-1]))
    transform = made("randaugment")
    chosen: Any = readers.reader(images, torch.device(device), loader, 2, transform)
    assert chosen == (expected, transform)
    if (loader, device) == ("auto", "cuda"):
        chosen = readers.reader(images, torch.device(device), loader, 2)
        assert chosen == ("resident", None)


def test_a_transforms_draws_do_not_depend_on_the_others() -> None:
    ids, stored = np.arange(40), pictures(40)
    alone = made("randomhorizontalflip")(stored.clone(), ids, 2)
    after = made("randominvert:1", "randomhorizontalflip")(stored.clone(), ids, 2)
    assert torch.equal(255 - after, alone)


def distance(one: Tensor, other: Tensor) -> float:
    """Kolmogorov and Smirnov's: the largest difference of two samples' distribution functions."""
    at = torch.cat([one, other]).unique()
    counts = [torch.searchsorted(x.sort().values, at, right=True) / len(x) for x in (one, other)]
    return float((counts[0] - counts[1]).abs().max())


def seen(images: Tensor) -> list[Tensor]:
    """A few numbers for each picture, that brightness, colour, contrast, place and shape change: float64 [n] each."""
    x = images.double()
    rows, columns = torch.arange(x.shape[2]).double(), torch.arange(x.shape[3]).double()
    return [
        x.mean((1, 2, 3)),
        x.std((1, 2, 3)),
        x[:, 0].mean((1, 2)) - x[:, -1].mean((1, 2)),
        (x.mean((1, 3)) * rows).sum(1),
        (x.mean((1, 2)) * columns).sum(1),
    ]


def bound(one: int, other: int) -> float:
    """Of `distance`: two samples of one distribution are above it once in 10^6 (2 exp(-2 d^2 n m / (n + m)))."""
    return float(np.sqrt(np.log(2e6) / 2 * (one + other) / (one * other)))


@pytest.mark.parametrize("spec", [s for s in SPECS if ":own" not in s])
def test_the_draws_are_distributed_as_torchvisions(spec: str) -> None:
    keyed_count, count = 500, 700
    apply: Callable[[Tensor], Tensor] = built(spec, (3, 12, 9), MEAN)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        unkeyed = torch.stack([apply(image) for image in pictures(count)])
    ids = np.arange(keyed_count) // 5, np.arange(keyed_count) % 5  # of 100 samples, 5 epochs each
    transform, stored = made(spec), pictures(keyed_count)
    keyed = torch.cat([transform(stored[:100].clone(), ids[0][ids[1] == epoch], epoch) for epoch in range(5)])
    numbers = list(zip(seen(keyed), seen(unkeyed), strict=True))
    for one, other in numbers:
        assert distance(one, other) < bound(keyed_count, count)
        if one.std() > 0:  # neighbours, by id and by epoch, are not alike
            for lag in (1, 100):
                assert abs(np.corrcoef(one[lag:], one[:-lag])[0, 1]) < 0.25
    frozen = [one[:1].expand(keyed_count) for one, _ in numbers]
    found = [distance(one, other) for one, (_, other) in zip(frozen, numbers, strict=True)]
    assert max(found) > bound(keyed_count, count), "one draw for all would be seen"


def test_probabilities_are_kept() -> None:
    changed = (made("gaussianblur:3,p=0.3")(pictures(600), np.arange(600), 0) != pictures(600)).flatten(1).any(1)
    assert 0.2 < changed.float().mean() < 0.4


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 13, 10), (4, 9, 9)])
def test_pictures_of_another_size_are_put_back(shape: tuple[int, int, int]) -> None:
    for spec in ("randomcrop:5", "randomresize:6,20", "tests.data.test_transforms:own_pipeline", "randomresizedcrop"):
        transform = made(spec, shape=shape)
        out = transform(pictures(6, shape), np.arange(6), 0)
        assert out.shape == (6, *shape)
        assert torch.equal(out[2:3], transform(pictures(1, shape), np.array([2]), 0))


def test_every_transform_of_one_picture_is_known_by_its_name() -> None:
    assert {"randaugment", "trivialaugmentwide", "augmix", "randomerasing", "colorjitter", "jpeg"} <= set(known())
    jitter: Any = built("Color-Jitter:0.4,hue=(-0.1,0.1)", (3, 9, 9), MEAN)
    assert (*jitter.brightness, *jitter.hue) == (0.6, 1.4, -0.1, 0.1)
    crop: Any = built("random_resized_crop:interpolation=BICUBIC", (3, 9, 7), MEAN)
    assert (list(crop.size), crop.interpolation) == ([9, 7], v2.InterpolationMode.BICUBIC)
    assert built("randomrotation:9,fill=mean", (3, 9, 9), MEAN)._fill  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("randaugmnt:2,9", "unknown transform 'randaugmnt'\n  Did you mean randaugment"),
        ("mnist", "unknown transform 'mnist'\n  .*A recipe stands before the flags"),
        ("cutmix", "sample 0: "),
        ("normalize:(0.5,),(0.2,)", "sample 0: "),
        ("todtype:None", "--augment todtype:None"),
        ("compose", "missing .* argument: 'transforms'"),
        ("fivecrop:3", r"makes a tuple of a picture"),
        ("os:system", r"--augment os:system, sample 0: expected str, bytes or os.PathLike object, not Tensor"),
        ("randaugment:2,size=3", "unexpected keyword argument 'size'\n  It takes num_ops=2, magnitude=9"),
        ("randaugment:2)+(3", "are no values with commas between them"),
        ("randaugment:2,", None),
        ("randaugment:**x", r"\*\* is no value"),
        ("colorjitter:f(3)", r"f\(3\) is no number, word or list"),
        ("randaugment:(", "was never closed"),
        ("gaussianblur", "missing .* argument: 'kernel_size'\n  It takes kernel_size, sigma"),
        ("gaussianblur:4", "odd and positive"),
        ("autoaugment:cifar11", "'cifar11' is not a valid AutoAugmentPolicy"),
        ("randomerasing:value=random", "noise for pictures that are normalised"),
        ("no_such_module:fn", "there is no module 'no_such_module'"),
        ("tests.data.test_transforms:MEAN", "is no function"),
        ("tests.data.test_transforms:makes_floats", r"makes torch.float32 \[3, 12, 9\] of a picture"),
        ("grayscale", r"makes \[1, 12, 9\] of a picture of \[3, 12, 9\]"),
        ("randomcrop:20", "sample 0: .*crop size .* is larger than"),
        ("elastictransform", "sample 0: .*Padding size should be less"),
    ],
)
def test_what_can_not_work_is_refused_before_the_first_step(spec: str, message: str | None) -> None:
    images = ArraySet("some", ("a",), MEAN, MEAN, (pictures(2).numpy(),), np.zeros(2, np.int64), "")
    if message is None:
        assert tried_transforms((spec,), 0, images)
        return
    with pytest.raises(UserError, match=message):
        tried_transforms((spec,), 0, images)


def test_pictures_that_are_normalised_already_are_refused() -> None:
    images = ArraySet("mine", ("a",), (0.0,), (1.0,), (np.zeros((2, 1, 4, 4), np.float32),), np.zeros(2, np.int64), "")
    with pytest.raises(UserError, match=r"pictures of mine are torch\.float32, and taken as normalised already"):
        tried_transforms(("randaugment",), 0, images)
    assert tried_transforms((), 0, images) is None


def test_an_error_of_ones_own_function_passes_through_and_says_where() -> None:
    with pytest.raises(ArithmeticError, match="of its own") as caught:
        made("tests.data.test_transforms:fails")(pictures(1), np.array([7]), 2)
    assert caught.value.__notes__ == ["in --augment tests.data.test_transforms:fails, sample 7, epoch 2"]
