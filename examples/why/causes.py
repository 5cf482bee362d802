"""Why the accuracy on eight ranks differs from that on one: each cause alone, and the size of what it does.

    python examples/why/causes.py                      every cause, 20 seeds; a minute on one core
    python examples/why/causes.py --seeds 5            in seconds
    python examples/why/causes.py --only "set_epoch"   the causes whose name holds a word

Each pair of trainings has the same seed and differs by one cause. `size` is the root mean square of the difference in
top-1 over the seeds, in percentage points; `mean` is its mean with the 95 % interval; `loss x` is the factor of the
test loss. A mean whose interval holds 0 is
noise: the cause makes another training, and not a worse one.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from ranks import TRAIN, Setup, Trained, order, train

RIGHT = Setup()
NORM = Setup(norm="global", drop_last=True)
DROP = Setup(dropout="own")
SHIFT = Setup(shift="own")
_T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26, 20: 2.09, 40: 2.02}  # Student's, n - 1 degrees


@dataclass(frozen=True)
class Cause:
    """A training beside the right one; or the right one, measured wrongly."""

    name: str
    wrong: Setup = RIGHT
    right: Setup = RIGHT
    measure: Callable[[Trained], float] | None = None


def part_of_rank_0(trained: Trained) -> float:
    """Top-1 on every eighth test sample alone, taken for all of them."""
    return 100 * float(trained.right[::8].mean())


def padding_counted(trained: Trained) -> float:
    """Top-1 with the first samples twice, so that eight ranks have as many."""
    return 100 * float(torch.cat([trained.right, trained.right[: -len(trained.right) % 8]]).mean())


def mean_of_batch_means(trained: Trained) -> float:
    """The mean over batches of 256 of their top-1: the last one, which is smaller, counts as much."""
    return 100 * float(torch.stack([batch.mean() for batch in trained.right.split(256)]).mean())


CAUSES = [
    Cause("(another seed, for comparison)", replace(RIGHT, init_seed=1000, order_seed=1000)),
    Cause("batch size meant per process, rate as it was", replace(RIGHT, batch=512)),
    Cause("batch size meant per process, rate x 8", replace(RIGHT, batch=512, lr=0.4)),
    Cause("batch size meant per process, rate x sqrt 8", replace(RIGHT, batch=512, lr=0.05 * 8**0.5)),
    Cause("global batch kept, rate x 8 all the same", replace(RIGHT, lr=0.4)),
    Cause("batch size divided twice, by hand and by the library", replace(RIGHT, batch=8)),
    Cause("no set_epoch: one order for all epochs", replace(RIGHT, set_epoch=False)),
    Cause("another order of the same samples", replace(RIGHT, order_seed=1000)),
    Cause("ranks' means averaged, shares 8 and 7", Setup(batch=60, rank_means=True), Setup(batch=60)),
    Cause(
        "ranks' means averaged, classes weighted", Setup(class_weights=True, rank_means=True), Setup(class_weights=True)
    ),
    Cause("padding trained twice", replace(RIGHT, pad=True)),
    Cause("last partial batch left out", replace(RIGHT, drop_last=True)),
    Cause("scheduler steps 8 times in a step", replace(RIGHT, schedule_steps=8)),
    Cause("batch norm over a rank's 8 samples", replace(NORM, norm="local"), NORM),
    Cause("batch norm over a rank's 2 samples", replace(NORM, batch=16, norm="local"), replace(NORM, batch=16)),
    Cause("the same dropout masks on all ranks", replace(DROP, dropout="equal"), DROP),
    Cause("the same random shifts on all ranks", replace(SHIFT, shift="equal"), SHIFT),
    Cause("the same random shifts in all epochs", replace(SHIFT, shift="frozen"), SHIFT),
    Cause("padded after normalising, not before", replace(SHIFT, pad_first=False), SHIFT),
    Cause("sums rounded in another order", replace(RIGHT, summed="by rank")),
    Cause("an eighth of the test set evaluated", measure=part_of_rank_0),
    Cause("padding counted twice in evaluation", measure=padding_counted),
    Cause("mean of the batches' accuracies", measure=mean_of_batch_means),
]


@cache
def trained(setup: Setup, seed: int) -> Trained:
    """As `train`, once for each."""
    return train(setup, seed)


def differences(cause: Cause, seeds: int) -> list[float]:
    """Percentage points of top-1, wrong less right, one for each seed."""
    measure = cause.measure or (lambda trained: trained.top1)
    return [measure(trained(cause.wrong, seed)) - trained(cause.right, seed).top1 for seed in range(seeds)]


def loss_ratio(cause: Cause, seeds: int) -> float:
    """The test loss over that of the right training, the geometric mean over the seeds."""
    ratios = [trained(cause.wrong, seed).loss / trained(cause.right, seed).loss for seed in range(seeds)]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def summary(values: list[float]) -> tuple[float, float, float]:
    """Root mean square, mean, and half of the mean's 95 % interval."""
    n, mean = len(values), sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    student = _T95[max(known for known in _T95 if known <= n)]
    return math.sqrt(sum(value**2 for value in values) / n), mean, student * math.sqrt(variance / n)


@dataclass(frozen=True)
class Row:
    """What a cause does, over the seeds."""

    name: str
    size: float  # percentage points
    mean: float
    half: float
    loss: float
    steps: int

    def __str__(self) -> str:
        shown = f"{self.size:6.2f}  {self.mean:+6.2f}  ±{self.half:5.2f}  {self.loss:6.3f}  {self.steps:6}"
        return f"{shown}  {self.name}"


def rows(causes: list[Cause], seeds: int) -> list[Row]:
    """One for each cause, the largest size first."""
    found = []
    for cause in causes:
        steps = sum(len(order(cause.wrong, 0, epoch)) for epoch in range(cause.wrong.epochs))
        size, mean, half = summary(differences(cause, seeds))
        found.append(Row(cause.name, size, mean, half, loss_ratio(cause, seeds), steps))
    return sorted(found, key=lambda row: (-row.size, row.name))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tops = [trained(RIGHT, seed).top1 for seed in range(args.seeds)]
    print(f"{TRAIN} digits to train on, 8 ranks, batch 64, 10 epochs, {args.seeds} seeds")
    print(f"right: top-1 {sum(tops) / len(tops):.2f} %")
    print("  size    mean    95 %  loss x   steps  cause")
    for row in rows([cause for cause in CAUSES if args.only in cause.name], args.seeds):
        print(row)


if __name__ == "__main__":
    main()
