"""Augmentation of a whole batch at once, each draw keyed by (seed, epoch, sample id).

The result for a sample is bit-equal on any rank, in any batch, on any device and from any loader: offsets are integers
from `lockstep.randomness`, pixels are copied, and normalisation is one multiplication and one addition a pixel.

Mixup and CutMix mix the samples at positions p and p xor 1 of the global batch with each other. All is drawn for a
pair, keyed by (seed, epoch, position of the pair in the epoch), so it depends neither on the number of ranks nor on how
a batch is cut. A rank whose part begins or ends within a pair reads the other half as well: nothing is sent. A last odd
sample stays itself.

Mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018. CutMix: Yun et al., ICCV 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from lockstep.data.image_sets import Ids, members
from lockstep.data.order import Shard
from lockstep.distributed.devices import to_device
from lockstep.randomness import integers, integers_np, stream, uniform_np

_LARGE = 1 << 15  # values of an image, from which on a batch of them is beyond a core's caches


@lru_cache
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Float32 [C, 1, 1] each, so that pixel * scale + shift = (pixel / 255 - mean) / std.

    Kept, since a copy to the device would be waited for at every step.
    """
    scale = torch.tensor([1 / (255 * s) for s in std], device=device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)
    return scale[:, None, None], shift[:, None, None]


@dataclass(frozen=True)
class Augment:
    """From stored images to the network's input."""

    mean: tuple[float, ...]  # per channel, of pixel values in [0, 1]
    std: tuple[float, ...]
    seed: int = 0  # the run's
    crop_padding: int = 0  # pad by so many pixels and crop back at random
    crop_fill: str = "zero"  # or "reflect": the padding mirrors the image at its edge, which it does not repeat
    flip: bool = False  # mirror half of the images
    alternate_flip: bool = False  # mirror an image in every second epoch; which half begins is drawn once
    cutout: int = 0  # side in pixels of a square set to the mean
    image_size: int = 0  # side of the output in pixels (0: as stored), bilinear

    def __call__(self, images: Tensor, ids: Tensor, epoch: int | None) -> Tensor:
        """images uint8 [b, C, H, W] and ids int64 [b] to float32 [b, C, S, S]; epoch None: nothing random.

        Floating-point images are taken as normalised already.
        """
        large = images.device.type == "cpu" and images.dtype == torch.uint8 and images.shape[1:].numel() >= _LARGE
        if large and not self.crop_padding:
            images = self._one_by_one(images, ids, epoch)
        elif epoch is not None and (self.crop_padding or self.flip or self.alternate_flip):
            by_rows = images.device.type == "cpu" and images.dtype != torch.bfloat16  # which numpy lacks
            images = (self._crop_rows if by_rows else self._crop_pixels)(images, ids, epoch)
        out = self._normalise(images) if images.dtype == torch.uint8 else images
        if epoch is not None and self.cutout:
            out = self._cut_out(out, ids, epoch)
        if self.image_size and tuple(out.shape[-2:]) != (self.image_size, self.image_size):
            out = F.interpolate(out, size=(self.image_size, self.image_size), mode="bilinear", antialias=True)
        return out

    def _normalise(self, images: Tensor) -> Tensor:
        scale, shift = _scale_and_shift(self.mean, self.std, images.device)
        # two roundings, never a fused multiply-add: a vector loop and its scalar tail then agree on every bit
        return images.to(torch.float32).mul_(scale).add_(shift)

    def _one_by_one(self, images: Tensor, ids: Tensor, epoch: int | None) -> Tensor:
        """Mirrored and normalised while an image is in the caches; for 224x224 in less than half of a batch's time."""
        scale, shift = _scale_and_shift(self.mean, self.std, images.device)
        out = torch.empty_like(images, dtype=torch.float32)
        flips = epoch is not None and (self.flip or self.alternate_flip)
        mirrored = self._mirrored(ids.numpy(), epoch or 0).tolist() if flips else [0] * len(images)
        for image, into, flipped in zip(images, out, mirrored, strict=True):
            into.copy_(image.flip(-1) if flipped else image).mul_(scale).add_(shift)
        return out

    def _crop_rows(self, images: Tensor, ids: Tensor, epoch: int) -> Tensor:
        """On a CPU: whole rows are copied, without an index a pixel; nearly twice as fast there as `_crop_pixels`."""
        b, c, h, w = images.shape
        pad, samples = self.crop_padding, ids.numpy()
        padded = self._padded(images).numpy()
        top = integers_np(stream(self.seed, "crop-y", epoch), samples, 2 * pad + 1)
        left = integers_np(stream(self.seed, "crop-x", epoch), samples, 2 * pad + 1)
        mirrored = self._mirrored(samples, epoch)
        if not (self.flip or self.alternate_flip):
            mirrored[:] = 0
        out = np.empty(images.shape, padded.dtype)
        s = padded.strides
        crops = as_strided(padded, (b, 2 * pad + 1, 2 * pad + 1, c, h, w), (s[0], s[2], s[3], s[1], s[2], s[3]))
        for flipped, view in enumerate((crops, crops[..., ::-1])):
            here = np.flatnonzero(mirrored == flipped)
            out[here] = view[here, top[here], left[here]]
        return torch.from_numpy(out)

    def _mirrored(self, samples: Ids, epoch: int) -> Ids:
        """1 for each sample that is mirrored in this epoch, else 0."""
        return integers_np(self._flip_key(epoch), samples, 2) ^ (epoch % 2 if self.alternate_flip else 0)

    def _flip_key(self, epoch: int) -> int:
        return stream(self.seed, "flip", 0 if self.alternate_flip else epoch)

    def _padded(self, images: Tensor) -> Tensor:
        """Images with `crop_padding` more pixels on each side: [b, C, H + 2 pad, W + 2 pad]."""
        pad = self.crop_padding
        if self.crop_fill == "zero":
            return F.pad(images, (pad, pad, pad, pad))
        for dim in (2, 3):  # torch's own reflection takes no uint8
            size = images.shape[dim]
            index = torch.arange(-pad, size + pad, device=images.device).abs()
            images = images.index_select(dim, size - 1 - (size - 1 - index).abs())
        return images

    def _crop_pixels(self, images: Tensor, ids: Tensor, epoch: int) -> Tensor:
        b, c, h, w = images.shape
        pad = self.crop_padding
        rows = torch.arange(h, device=ids.device).expand(b, h)
        columns = torch.arange(w, device=ids.device).expand(b, w)
        if pad:
            images = self._padded(images)
            rows = rows + integers(stream(self.seed, "crop-y", epoch), ids, 2 * pad + 1)[:, None]
            columns = columns + integers(stream(self.seed, "crop-x", epoch), ids, 2 * pad + 1)[:, None]
        if self.flip or self.alternate_flip:
            mirrored = integers(self._flip_key(epoch), ids, 2) ^ (epoch % 2 if self.alternate_flip else 0)
            columns = torch.where(mirrored.bool()[:, None], columns.flip(1), columns)
        # one gather over all pixels of the batch; an index a pixel, shared by the channels
        index = (rows[:, :, None] * images.shape[3] + columns[:, None, :]).reshape(b, 1, h * w).expand(b, c, h * w)
        return images.flatten(2).gather(2, index).view(b, c, h, w)

    def _cut_out(self, images: Tensor, ids: Tensor, epoch: int) -> Tensor:
        h, w = images.shape[-2:]
        top = integers(stream(self.seed, "cutout-y", epoch), ids, h) - self.cutout // 2
        left = integers(stream(self.seed, "cutout-x", epoch), ids, w) - self.cutout // 2
        y = torch.arange(h, device=ids.device) - top[:, None]  # [b, H]
        x = torch.arange(w, device=ids.device) - left[:, None]
        inside = ((y >= 0) & (y < self.cutout))[:, :, None] & ((x >= 0) & (x < self.cutout))[:, None, :]
        return images.masked_fill(inside[:, None], 0.0)


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


def pairs(shards: Sequence[Shard], count: int) -> Pairs:
    """The pairs of a rank's shards of a global batch of `count` samples."""
    own = np.concatenate([np.arange(0), *(np.arange(p.rows.start, p.rows.stop) for p in shards)])
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
    """Mixes a batch, and makes its labels soft."""

    seed: int  # the run's
    classes: int  # how many there are
    mixup: float = 0.0  # alpha of Beta(alpha, alpha), from which a pair's lambda is drawn; 0: no such mixing
    cutmix: float = 0.0
    sets: Tensor | None = None  # which classes a label means where it is several, as `table_on` gives it

    @property
    def note(self) -> str:
        """For the run's start: what is mixed."""
        kinds = [f"{name} {alpha:g}" for name, alpha in (("mixup", self.mixup), ("CutMix", self.cutmix)) if alpha]
        return f"{' and '.join(kinds)} mix pairs of neighbours in the global batch"

    def drawn(self, at: np.ndarray, height: int, width: int, epoch: int) -> Drawn:
        """What mixes the samples at these positions of an epoch: int64 [b], both of a pair given as its first."""

        def uniform(what: str) -> np.ndarray:
            return uniform_np(stream(self.seed, f"mix-{what}", epoch), at)

        cut = uniform("switch") < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        first, second = uniform("lambda"), uniform("lambda-sign")
        lam = np.ones(len(at))
        for here, alpha in ((~cut, self.mixup), (cut, self.cutmix)):
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
