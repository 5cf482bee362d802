import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import EMPTY_LEDGER, Ledger, Order, extend_ledger, permute
from lockstep.distributed.world import shard_of
from lockstep.errors import UserError
from lockstep.randomness import stream


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(n: int, key: int) -> None:
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@given(n=st.integers(1, 2**61), key=st.integers(0, 2**64 - 1), data=st.data())
def test_permute_stays_in_range_and_apart(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=20, unique=True))
    out = permute(np.array(positions, dtype=np.int64), n, key)
    assert all(0 <= i < n for i in out.tolist())
    assert len(set(out.tolist())) == len(positions)


@pytest.mark.parametrize("n", [3, 4, 5, pytest.param(6, marks=pytest.mark.slow)])
def test_every_permutation_is_as_likely(n: int) -> None:
    trials = max(1200, 12 * math.factorial(n))
    seen = Counter(tuple(permute(np.arange(n), n, stream(s, "t")).tolist()) for s in range(trials))
    expected = trials / math.factorial(n)
    chi2 = sum((seen[p] - expected) ** 2 / expected for p in itertools.permutations(range(n)))
    dof = math.factorial(n) - 1
    assert chi2 < dof + 5 * math.sqrt(2 * dof)  # five standard deviations; four rounds miss it by hundreds


@pytest.mark.parametrize("n", [4, 7, 9, 25, 121])
def test_even_and_odd_permutations_are_as_likely(n: int) -> None:
    """Rounds that rotate digits of odd bases are even permutations all: half of the orders would never come."""

    def odd(permutation: list[int]) -> int:
        cycles, left = 0, set(range(n))
        while left:
            cycles, at = cycles + 1, left.pop()
            while (at := permutation[at]) in left:
                left.remove(at)
        return (n - cycles) % 2

    trials = 400
    count = sum(odd(permute(np.arange(n), n, stream(s, "parity")).tolist()) for s in range(trials))
    assert abs(count - trials / 2) < 5 * math.sqrt(trials) / 2


@given(
    n=st.integers(1, 500),
    batch=st.integers(1, 600),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
    fraction=st.floats(0.01, 1.0),
)
def test_an_epoch_sees_each_sample_of_its_subset_once(
    n: int, batch: int, seed: int, epoch: int, fraction: float
) -> None:
    order = Order(n, batch, seed, fraction)
    ids = np.concatenate(list(order.steps(epoch)))
    assert len(ids) == len(set(ids.tolist())) == order.samples_per_epoch == max(1, round(n * fraction))
    again = np.concatenate(list(order.steps(epoch + 1)))
    assert sorted(ids.tolist()) == sorted(again.tolist())  # the subset is the same in every epoch


def test_seed_and_epoch_are_not_one_number() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return Order(1000, 100, seed).step(epoch, 0).tolist()

    assert first(0, 1) != first(1, 0)
    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(0, 1)


def test_drop_last() -> None:
    order = Order(10, 4, 0, drop_last=True)
    assert [len(ids) for ids in order.steps(0)] == [4, 4]
    with pytest.raises(UserError, match="drop-last"):
        Order(3, 4, 0, drop_last=True)


@pytest.mark.parametrize("batch", [7, 8, 2**63, 10**30])
def test_a_batch_larger_than_the_set_is_the_whole_set(batch: int) -> None:
    order = Order(7, batch, 0)
    assert order.steps_per_epoch == 1
    assert sorted(order.step(3, 0).tolist()) == list(range(7))


def test_a_huge_epoch_starts_at_once() -> None:
    ids = Order(10**12, 256, 0).step(3, 10**9)  # would need terabytes if the epoch were laid out
    assert len(set(ids.tolist())) == 256
    assert ids.max() > 10**11


@given(n=st.integers(0, 1000), size=st.integers(1, 64))
def test_shares_tile_the_batch_and_differ_by_at_most_one(n: int, size: int) -> None:
    parts = [shard_of(n, rank, size) for rank in range(size)]
    assert [i for p in parts for i in range(n)[p]] == list(range(n))
    lengths = [p.stop - p.start for p in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_the_ledger_is_a_chain_over_ids_in_order() -> None:
    one = extend_ledger(extend_ledger(EMPTY_LEDGER, np.array([1, 2])), np.array([3]))
    assert one == extend_ledger(extend_ledger(EMPTY_LEDGER, np.array([1, 2])), np.array([3]))
    assert one != extend_ledger(extend_ledger(EMPTY_LEDGER, np.array([2, 1])), np.array([3]))
    assert one != extend_ledger(extend_ledger(EMPTY_LEDGER, np.array([1])), np.array([2, 3]))


@given(
    steps=st.lists(st.tuples(st.integers(0, 2000), st.booleans()), max_size=20),
    before=st.sampled_from([EMPTY_LEDGER, b"\x07" * 32]),
)
def test_a_ledger_is_the_chain_of_its_steps_whenever_it_is_asked(steps: list[tuple[int, bool]], before: bytes) -> None:
    ledger, chain = Ledger(before), before
    for number, (count, asked) in enumerate(steps):
        ids = np.arange(number, number + count)
        ledger.extend(ids)
        chain = extend_ledger(chain, ids)
        assert not asked or ledger.digest == chain
    assert ledger == Ledger(chain)
    ledger.extend(np.arange(3))
    assert ledger != Ledger(chain)
