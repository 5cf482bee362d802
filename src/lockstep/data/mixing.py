"""Mixup and CutMix over the global batch: the samples at positions p and p xor 1 are mixed with each other.

Everything is drawn for a pair, keyed by (seed, epoch, position of the pair in the epoch), so it depends neither on the
number of ranks nor on how a batch is cut. A rank whose part begins or ends within a pair reads the other half as well,
a sample at each end at most: shares and slices stay as they are, and nothing is sent. A last odd sample stays itself.

Mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018. CutMix: Yun et al., ICCV 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.data.label_sets import members
from lockstep.data.pieces import Piece
from lockstep.processes.devices import to_device
from lockstep.randomness import integers_np, stream, uniform_np

_GRID = 2.0**16  # lambda is a multiple of 2**-16: exact in float32, and equal where two libraries' cosines are not


@dataclass(frozen=True)
class Pairs:
    """What a rank reads of a global batch for its part of it, and where the partners are."""

    positions: np.ndarray  # int64 [b + h], of the global batch: its own b, then partners out of others' parts
    partner: np.ndarray  # int64 [b], each own sample's partner as an index into `positions`

    @property
    def own(self) -> np.ndarray:
        """int64 [b], the positions that the rank trains on."""
        return self.positions[: len(self.partner)]


def pairs(pieces: Sequence[Piece], count: int) -> Pairs:
    """The pairs of a rank's pieces of a global batch of `count` samples."""
    own = np.concatenate([np.arange(0), *(np.arange(p.rows.start, p.rows.stop) for p in pieces)])
    partner = np.where((own ^ 1) < count, own ^ 1, own)
    positions = np.concatenate([own, np.setdiff1d(partner, own)])
    index = np.zeros(count, np.int64)
    index[positions] = np.arange(len(positions))
    return Pairs(positions, index[partner])


@dataclass(frozen=True)
class Drawn:
    """What was drawn for each of b samples; the same for both of a pair."""

    blend: np.ndarray  # float64 [b]: a pixel is blend * own + (1 - blend) * the partner's; 1 for CutMix
    box: np.ndarray  # int64 [b, 4]: top, bottom, left, right of what is the partner's; empty for mixup
    label: np.ndarray  # float64 [b]: the own label's part


@dataclass(frozen=True)
class Mixing:
    """Mixes a batch, and makes its labels soft.

    Args:
        seed: the run's.
        classes: how many there are.
        mixup, cutmix: alpha of Beta(alpha, alpha), from which a pair's lambda is drawn; 0: no such mixing.
        prob: the part of the pairs that are mixed.
        switch: of those, the part that CutMix takes where mixup is on as well.
        epochs: how many epochs are mixed, the first ones (None: all).
        sets: which classes a label means where it is several, as `label_sets.table_on` gives it.
    """

    seed: int
    classes: int
    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch: float = 0.5
    epochs: int | None = None
    sets: Tensor | None = None

    def on(self, epoch: int) -> bool:
        """True where the samples of an epoch are mixed."""
        return bool(self.mixup or self.cutmix) and (self.epochs is None or epoch < self.epochs)

    @property
    def note(self) -> str:
        """For the run's start: what is mixed, and until when."""
        kinds = [f"{name} {alpha:g}" for name, alpha in (("mixup", self.mixup), ("CutMix", self.cutmix)) if alpha]
        until = "" if self.epochs is None else f", in the first {self.epochs} epoch(s)"
        return f"{' and '.join(kinds)} mix {self.prob:.0%} of the pairs of neighbours in the global batch{until}"

    def drawn(self, at: np.ndarray, height: int, width: int, epoch: int) -> Drawn:
        """What mixes the samples at these positions of an epoch: int64 [b], both of a pair given as its first."""

        def uniform(what: str) -> np.ndarray:
            return uniform_np(stream(self.seed, f"mix-{what}", epoch), at)

        share = self.switch if self.mixup and self.cutmix else float(self.cutmix > 0)
        mixed, cut = uniform("prob") < self.prob, uniform("switch") < share
        first, second = uniform("lambda"), uniform("lambda-sign")
        lam = np.ones(len(at))
        for here, alpha in ((mixed & ~cut, self.mixup), (mixed & cut, self.cutmix)):
            if alpha:
                lam[here] = symmetric_beta(alpha, first[here], second[here])
        side = np.sqrt(1 - np.where(cut, lam, 1.0))  # of the box, as a part of the image's
        box = []
        for what, length in (("y", height), ("x", width)):
            centre = integers_np(stream(self.seed, f"mix-{what}", epoch), at, length)
            half = (length * side).astype(np.int64) // 2
            box += [np.maximum(centre - half, 0), np.minimum(centre + half, length)]
        area = (box[1] - box[0]) * (box[3] - box[2]) / (height * width)
        return Drawn(np.where(cut, 1.0, lam), np.stack(box, 1), np.where(cut, 1 - area, lam))

    def __call__(self, images: Tensor, labels: Tensor, pairs: Pairs, epoch: int, first: int) -> tuple[Tensor, Tensor]:
        """Mix the samples that a rank has read.

        Args:
            images: float [b + h, C, H, W], and labels: int64 [b + h], as `pairs` has them.
            first: the position in the epoch of the batch's first sample.

        Returns:
            Images [b, C, H, W] and soft labels, float32 [b, classes].
        """
        height, width = images.shape[-2:]
        drawn = self.drawn(first + (pairs.own & ~1), height, width, epoch)
        # one copy to the device; float32 holds all of it exactly, but for a box's part of the label
        numbers = np.concatenate([drawn.blend[:, None], drawn.label[:, None], drawn.box], 1).astype(np.float32)
        numbers[pairs.partner == np.arange(len(pairs.partner)), :2] = 1.0  # a last odd one is nobody's partner
        table = to_device(torch.from_numpy(numbers), images.device)
        partner = to_device(torch.from_numpy(pairs.partner), images.device)
        part = table[:, 0].to(images.dtype)[:, None, None, None]  # of the own pixel
        if self.cutmix:
            top, bottom, left, right = table[:, 2:].to(torch.int64)[:, :, None].unbind(1)  # [b, 1] each
            y, x = (torch.arange(length, device=images.device) for length in (height, width))
            rows, columns = (y >= top) & (y < bottom), (x >= left) & (x < right)
            part = torch.where(rows[:, None, :, None] & columns[:, None, None, :], 0, part)  # [b, 1, H, W]
        # products, then a sum, never fused: every bit is the same for any batch shape
        own = images[: len(partner)] * part
        own.add_(images.index_select(0, partner).mul_(1 - part))
        hard = members(labels, self.classes, self.sets).to(torch.float32)
        label = table[:, 1:2]
        return own, (hard[: len(partner)] * label).add_(hard.index_select(0, partner) * (1 - label))


def symmetric_beta(alpha: float, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Draws from Beta(alpha, alpha), of two independent uniform numbers in [0, 1) each; multiples of 2**-16.

    T = sqrt(2 alpha (u^(-1 / alpha) - 1)) cos(2 pi v) is Student's with 2 alpha degrees of freedom (Bailey, "Polar
    generation of random variates with the t-distribution", Mathematics of Computation 62, 1994), and
    (1 + T / sqrt(2 alpha + T^2)) / 2 is Beta(alpha, alpha). No draw is rejected, so one key gives one number.
    """
    cosine = np.cos(2 * np.pi * v)
    # clipped where it is a lambda of 0 or 1 to the last bit
    square = np.expm1(np.minimum(-np.log1p(-u) / alpha, 600.0)) * cosine**2  # T^2 / (2 alpha)
    beta = (1 + np.copysign(np.sqrt(square / (1 + square)), cosine)) / 2
    return np.asarray(np.rint(beta * _GRID) / _GRID)
