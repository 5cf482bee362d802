"""What the matrix of combinations trains: awkward data, a model of several buckets, and the loop by hand beside it."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import Config
from lockstep.data.augment import Augment, Mixing, pairs
from lockstep.data.image_sets import ImageSet
from lockstep.data.order import Order, micro_batches
from lockstep.data.transforms import Transforms
from lockstep.distributed.world import World
from lockstep.rng.draws import Draws
from lockstep.rng.generators import pass_seed
from lockstep.rng.intercept import keyed
from lockstep.training import optimizers
from lockstep.training.precision import autocast, scaler

SAMPLES, BATCH, EPOCHS = 49, 8, 2  # a last batch of one sample, which is fewer than processes
BAD_STEP = 5  # the last of a round of three, and right before a checkpoint
ROUND = 3
_SIDE, _CLASSES = 6, 3
_BUCKET_MB = 0.002  # of DDP: each large layer has a bucket of its own
_SCALE = 128.0  # the first of fp16: 65,536 overflows or not by the share, which is by design


def _images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(SAMPLES) % _CLASSES
    patterns = torch.randn(_CLASSES, 1, _SIDE, _SIDE, generator=generator)
    return patterns[labels] + 0.5 * torch.randn(SAMPLES, 1, _SIDE, _SIDE, generator=generator), labels


def good() -> Any:
    """Float images with labels that can be learned."""
    images, labels = _images()
    return (images, labels), (images[:20], labels[:20])


def bad() -> Any:
    """The same with an infinite image in the step BAD_STEP of the first epoch."""
    images, labels = _images()
    images = images.clone()
    images[Order(SAMPLES, BATCH, 0).step(0, BAD_STEP)[-1]] = torch.inf
    return (images, labels), (_images()[0][:20], labels[:20])


def stored() -> Any:
    """The same as pixels, to be normalised."""
    (images, labels), _ = good()
    pixels = (images * 40 + 128).round().clamp(0, 255).to(torch.uint8)
    return (pixels, labels), (pixels[:20], labels[:20])


class Silent(nn.Module):
    """A matrix whose gradient is zero, and where asked for a parameter that takes no part."""

    def __init__(self, width: int, unused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.idle = nn.Parameter(torch.randn(width)) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.0 * (x @ self.weight)


class Block(nn.Module):
    """Layers that FSDP gathers, and activation checkpointing computes again, as a whole."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Inputs(nn.Module):
    """Images in the type of the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def _net(in_channels: int, num_classes: int, dtype: torch.dtype, unused: bool) -> nn.Module:
    norm = nn.BatchNorm2d(8)
    flat = 8 * (_SIDE - 2) ** 2
    return nn.Sequential(
        Inputs(dtype),
        Block(nn.Conv2d(in_channels, 8, 3, bias=False), norm, nn.Tanh(), nn.Flatten()),
        Block(nn.Linear(flat, 24), nn.Tanh(), nn.Dropout(0.2)),
        Block(Silent(24, unused), nn.Linear(24, 24), nn.Tanh()),
        nn.Linear(24, num_classes),
    ).to(dtype)


def net64(in_channels: int, num_classes: int) -> nn.Module:
    return _net(in_channels, num_classes, torch.float64, unused=False)


def net64_unused(in_channels: int, num_classes: int) -> nn.Module:
    return _net(in_channels, num_classes, torch.float64, unused=True)


def net32(in_channels: int, num_classes: int) -> nn.Module:
    return _net(in_channels, num_classes, torch.float32, unused=False)


def net32_unused(in_channels: int, num_classes: int) -> nn.Module:
    return _net(in_channels, num_classes, torch.float32, unused=True)


@contextmanager
def awkward() -> Iterator[None]:
    """Within: DDP has several buckets, fp16 where it doesn't overflow, compile is quick."""
    made, scaled, compiled = DistributedDataParallel.__init__, torch.amp.GradScaler, nn.Module.compile

    def small(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **{**kwargs, "bucket_cap_mb": _BUCKET_MB})

    def quick(self: nn.Module, **kwargs: Any) -> None:
        del kwargs
        torch._dynamo.reset()
        compiled(self, backend="eager")

    with (
        mock.patch.object(DistributedDataParallel, "__init__", small),
        mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(_BUCKET_MB * 2**20)),  # the compiler's
        mock.patch.object(torch.amp, "GradScaler", lambda kind: scaled(kind, init_scale=_SCALE)),
        mock.patch.object(nn.Module, "compile", quick),
    ):
        yield


@dataclasses.dataclass
class ByHand:
    """What the loop by hand came to."""

    weights: dict[str, Tensor]
    moved: float  # how far the weights went from where they began
    losses: list[float]  # of each step: the mean over its samples, from 0
    left_out: list[int]


def by_hand(config: Config) -> ByHand:
    """The run as plain torch has it, on one process.

    Draws in forward are keyed as ever, or no two loops could be compared.
    """
    from lockstep.training.assemble import build_model, load_data

    alone = World.single()
    train_set, _ = load_data(config, alone)
    pixels, targets = train_set.read(np.arange(SAMPLES), None)
    first = build_model(config, train_set)
    for name, parameter in first.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in config.model.freeze))
    loop = _Loop(copy.deepcopy(first), config)
    average = copy.deepcopy(first) if config.optim.ema else None
    order, losses, out, counted = Order(SAMPLES, BATCH, config.seed), [], [], 0
    for number in range(EPOCHS * order.steps_per_epoch):
        ids = order.step(*divmod(number, order.steps_per_epoch))
        weights, state = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
        rows, (epoch, t) = torch.from_numpy(ids), divmod(number, order.steps_per_epoch)
        images, labels = _mixed(config, _seen(config, train_set, pixels[rows], ids, epoch), targets[rows], epoch, t)
        losses.append(loop.step(number, ids, images, labels) / len(ids))
        if config.on_nonfinite != "stop" and not loop.finite:
            out.append(number)
            loop.model.load_state_dict(weights)
            loop.optimizer.load_state_dict(state)
        elif average is not None:
            most = (1 + counted) / (10 + counted) if config.optim.ema_warmup else 1.0
            decay = min(config.optim.ema, most) if counted else 0.0
            counted += 1
            with torch.no_grad():
                for mine, p in zip(average.parameters(), loop.model.parameters(), strict=True):
                    mine.copy_(decay * mine + (1 - decay) * p)
    result = loop.model
    if average is not None:
        for mean, buffer in zip(average.buffers(), result.buffers(), strict=True):
            mean.copy_(buffer)
        result = average
    begun = first.state_dict()
    weights = {name: value.detach() for name, value in result.state_dict().items()}
    return ByHand(weights, distance(weights, begun), losses, out)


def _seen(config: Config, images: ImageSet, pixels: Tensor, ids: np.ndarray, epoch: int) -> Tensor:
    """A whole batch as it leaves the transforms, normalised."""
    specs = config.data.augment
    shown = Transforms(specs, config.seed, images.shape, images.mean)(pixels, ids, epoch) if specs else pixels
    return Augment(images.mean, images.std)(shown, torch.from_numpy(ids), None)


def _mixed(config: Config, images: Tensor, labels: Tensor, epoch: int, t: int) -> tuple[Tensor, Tensor]:
    """A whole batch as it is trained on."""
    samples, count = config.samples, len(images)
    if not samples.mixes:
        return images, labels
    whole = pairs(micro_batches(count, 1, World.single()), count)
    return Mixing(config.seed, _CLASSES, samples.mixup, samples.cutmix)(images, labels, whole, epoch, t * BATCH)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Between two models' weights and buffers, all seen as one vector."""
    assert a.keys() == b.keys()
    return float(sum(((a[n].double() - b[n].double()) ** 2).sum() for n in a if "num_batches" not in n)) ** 0.5


class _Loop:
    """The loop by hand."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model, self.config, self.finite = model, config, True
        self.optimizer = optimizers.build(model, config.optim, config.lr)
        host = torch.device("cpu")
        self.autocast, self.scaler = autocast(config.precision, host), scaler(config.precision, host)
        self.draws = Draws(config.seed)

    def step(self, number: int, ids: np.ndarray, whole: Tensor, labels: Tensor) -> float:
        """Take one, of a global batch; returns the summed loss over this process's samples."""
        summed, exact = 0.0, self.config.exact
        shards = micro_batches(len(ids), exact or self.config.accumulate, World.single(), 1)
        shards = shards if any(p.size for p in shards) else ()
        self.optimizer.zero_grad()
        for shard in shards:
            mine = ids[shard.rows]
            if not len(mine):
                continue
            images = whole[shard.rows]
            torch.manual_seed(pass_seed(self.config.seed, number, shard.micro))
            with keyed(self.draws, self.model, number, mine, images):
                with self.autocast():
                    outputs, targets = self.model(images), labels[shard.rows]
                    loss = F.cross_entropy(outputs, targets.to(outputs.dtype) if targets.ndim > 1 else targets)
                weighted = loss * (len(mine) / len(ids))
                (self.scaler.scale(weighted) if self.scaler else weighted).backward()
            summed += float(loss.detach()) * len(mine)
        for p in self.model.parameters():
            if p.grad is None and not shards:
                p.grad = torch.zeros_like(p)  # a process without a sample goes on by its momentum
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.finite = all(bool(torch.isfinite(g).all()) for g in gradients)
        if self.config.optim.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        return summed
