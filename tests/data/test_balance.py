"""Orders in which a sample comes several times: how often classes and samples come, and by which numbers."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset

from lockstep.data.order import Balance, Classes, Order, labels_of, permute_each
from lockstep.errors import UserError
from tests.data.test_loaders import numbered

RARE = np.random.default_rng(0).permutation([0] * 60 + [1] * 25 + [3] * 9 + [4] * 3)  # class 2 has no sample
N = len(RARE)


def balanced(batch: int = 10, balance: Balance = "equal", **given: Any) -> Order:
    return Order(N, batch, 7, classes=Classes(RARE, None, 5, 7, balance), **given)


def epoch_of(order: Order, epoch: int) -> np.ndarray:
    return np.concatenate(list(order.steps(epoch)))


def test_a_range_and_a_key_for_each_position_give_permutations() -> None:
    sizes = np.arange(1, 70)
    n = np.repeat(sizes, sizes)
    positions = np.concatenate([np.arange(size) for size in sizes])
    keys = np.repeat(sizes, sizes).astype(np.uint64)
    together = permute_each(positions, n, keys)
    for size in sizes:
        mine = n == size
        assert sorted(together[mine]) == list(range(size))
        assert together[mine].tolist() == permute_each(positions[mine], n[mine], keys[mine]).tolist()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_permutations_of_a_small_class_are_equally_likely(n: int) -> None:
    trials = 12_000
    keys = np.repeat(np.arange(trials, dtype=np.uint64) << np.uint64(32), n)
    drawn = permute_each(np.tile(np.arange(n), trials), np.full(trials * n, n), keys).reshape(trials, n)
    counts = Counter(map(tuple, drawn.tolist()))
    kinds = list(itertools.permutations(range(n)))
    expected = trials / len(kinds)
    chi_square = sum((counts[kind] - expected) ** 2 / expected for kind in kinds)
    assert chi_square < {2: 10.8, 3: 20.5, 4: 49.7}[n]  # one in a thousand goes beyond, and the draws are fixed


def test_all_classes_come_equally_often_and_a_class_is_walked_through_from_epoch_to_epoch() -> None:
    order, seen = balanced(), np.empty(0, np.int64)
    assert order.note == "an epoch is 96 images: 24 draws of each class, so a sample comes 0.4 to 8 times"
    for epoch in range(5):
        numbers = epoch_of(order, epoch)
        assert np.bincount(RARE[numbers % N], minlength=5).tolist() == [24, 24, 0, 24, 24]
        seen = np.concatenate([seen, numbers])
        times = np.bincount(seen % N, minlength=N)
        for label in np.unique(RARE):
            mine = times[label == RARE]
            assert mine.max() - mine.min() <= 1, (epoch, label)
    assert len(set(seen)) == len(seen)  # every time has a number, and draws, of its own
    assert not np.array_equal(epoch_of(order, 0) % N, epoch_of(order, 1) % N)
    assert not np.array_equal(epoch_of(order, 0), epoch_of(Order(N, 10, 8, classes=order.classes), 0))


def test_square_roots_of_the_classes_sizes() -> None:
    order = balanced(balance="sqrt")
    counts = np.bincount(RARE[epoch_of(order, 0) % N], minlength=5)
    share = np.sqrt([60, 25, 9, 3])
    assert counts[[0, 1, 3, 4]].tolist() == np.rint(97 * share / share.sum()).tolist()


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    batch=st.integers(1, 6),
    repeats=st.integers(1, 3),
    fraction=st.floats(0.2, 1.0),
    classes=st.booleans(),
)
def test_a_step_is_a_function_of_its_place_alone(
    labels: list[int], batch: int, repeats: int, fraction: float, classes: bool
) -> None:
    n, values = len(labels), np.array(labels)
    used = Order(n, 1, 3, fraction).members()
    by_class = Classes(values, used, 5, 3, repeats=repeats) if classes else None
    order = Order(n, batch * repeats, 3, fraction, repeats=repeats, classes=by_class)
    steps = list(order.steps(1))
    assert [len(step) for step in steps[:-1]] == [order.batch_size] * (len(steps) - 1)
    assert sum(map(len, steps)) == order.samples_per_epoch
    for t in reversed(range(len(steps))):
        again = Order(n, batch * repeats, 3, fraction, repeats=repeats, classes=by_class)
        assert again.step(1, t).tolist() == steps[t].tolist()
    whole = np.concatenate([epoch_of(order, epoch) for epoch in range(3)])
    if classes or repeats > 1:  # a plain order's numbers are those of the samples, in each epoch again
        assert len(set(whole)) == len(whole)
    assert set(whole % n) <= set(range(n) if used is None else used)
    once = Order(n, batch, 3, fraction, classes=by_class)
    if repeats == 1:
        assert np.array_equal(epoch_of(once, 1), epoch_of(order, 1))


def test_every_sample_of_a_batch_comes_as_often_and_never_beside_itself() -> None:
    order = Order(N, 12, 5, repeats=3)
    assert order.note == "an epoch is 99 images: each of 33 draws 3 times in its batch"
    seen = np.empty(0, np.int64)
    for epoch in range(6):
        for step in order.steps(epoch):
            ids, counts = np.unique(step % N, return_counts=True)
            assert len(ids) == len(step) // 3 or epoch * 33 // N != (epoch + 1) * 33 // N
            assert (counts % 3 == 0).all()
            for copy in range(1, 3):
                shift = copy * len(step) // 3
                assert np.array_equal(step[shift : shift + len(step) // 3] % N, step[: len(step) // 3] % N)
        seen = np.concatenate([seen, epoch_of(order, epoch)])
        times = np.bincount(seen % N, minlength=N)
        assert times.max() - times.min() <= 3  # the walk through the set goes on
    assert len(set(seen)) == len(seen)


def test_the_last_short_batch_is_left_out_where_asked_for() -> None:
    assert balanced(10).steps_per_epoch == 10
    order = balanced(10, drop_last=True)
    assert (order.steps_per_epoch, order.samples_per_epoch) == (9, 90)
    assert Order(N, 12, 5, drop_last=True, repeats=3).samples_per_epoch == 96
    with pytest.raises(UserError, match="--drop-last leaves nothing: 96 samples"):
        balanced(200, drop_last=True)


def test_repeats_of_balanced_draws_make_no_longer_epochs() -> None:
    order = Order(N, 10, 7, repeats=2, classes=Classes(RARE, None, 5, 7, repeats=2))
    numbers = epoch_of(order, 0)
    assert np.bincount(RARE[numbers % N], minlength=5).tolist() == [24, 24, 0, 24, 24]
    said = "12 draws of each class, so a sample comes 0.2 to 4 times; each of 48 draws 2 times in its batch"
    assert order.note == f"an epoch is 96 images: {said}"


def test_an_index_is_kept_only_where_samples_do_not_lie_class_by_class() -> None:
    tidy = Classes(np.sort(RARE), None, 5, 7)
    assert tidy._index is None
    ids, _ = tidy.drawn(0, np.arange(tidy.draws))
    assert np.bincount(np.sort(RARE)[ids], minlength=5).tolist() == [24, 24, 0, 24, 24]


def test_labels_come_from_the_set_or_from_the_dataset_in_it() -> None:
    images = numbered()
    assert labels_of(images, "--balance equal").tolist() == list(range(23))
    inner = SimpleNamespace(targets=[5, 6, 7, 8])
    outer: Any = Subset(Subset(inner, [3, 1, 2]), [2, 0])  # type: ignore[arg-type]

    class Wrapped:
        name, dataset = "wrapped", outer

        def __len__(self) -> int:
            return 2

    wrapped: Any = Wrapped()
    assert labels_of(wrapped, "--balance equal").tolist() == [7, 8]
    del inner.targets
    with pytest.raises(UserError, match="--balance equal: wrapped does not say which class each of its 2 samples has"):
        labels_of(wrapped, "--balance equal")
