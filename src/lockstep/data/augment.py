"""Augmentation of a whole batch at once, each draw keyed by (seed, epoch, sample id).

The result for a sample is bit-equal on any rank, in any batch, on any device and from any loader: offsets are integers
from `lockstep.randomness`, pixels are copied, and normalisation is one multiplication and one addition a pixel.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from lockstep.data.arrays import Ids
from lockstep.randomness import integers, integers_np, stream

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
    """From stored images to the network's input.

    Args:
        mean, std: per channel, of pixel values in [0, 1].
        seed: the run's seed.
        crop_padding: pad by so many pixels and crop back at random.
        crop_fill: "zero", or "reflect": the padding mirrors the image at its edge, which it does not repeat.
        flip: mirror half of the images.
        alternate_flip: mirror an image in every second epoch; which half begins is drawn once.
        cutout: side in pixels of a square set to the mean.
        image_size: side of the output in pixels (0: as stored), bilinear.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    seed: int = 0
    crop_padding: int = 0
    crop_fill: str = "zero"
    flip: bool = False
    alternate_flip: bool = False
    cutout: int = 0
    image_size: int = 0

    def __call__(self, images: Tensor, ids: Tensor, epoch: int | None) -> Tensor:
        """images: uint8 [b, C, H, W]; ids: int64 [b]; epoch None: evaluation, nothing random.

        Returns float32 [b, C, S, S]. Floating-point images are taken as normalised already.
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
