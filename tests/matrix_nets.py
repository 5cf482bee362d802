"""What the matrix of combinations trains: awkward data, a model of several buckets, and the loop by hand beside it."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
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
from lockstep.data.arrays import ImageSet
from lockstep.data.augment import Augment
from lockstep.data.mixing import Mixing, pairs
from lockstep.data.order import Order
from lockstep.data.pieces import micro_batches
from lockstep.data.transforms import transforms
from lockstep.draws.generators import piece_seed
from lockstep.draws.intercept import keyed
from lockstep.draws.keyed import Draws
from lockstep.parallel import compression
from lockstep.processes.world import World
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
    """Within: DDP has several buckets, PowerSGD begins at once, fp16 where it doesn't overflow, compile is quick."""
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
        mock.patch.object(compression, "PLAIN_STEPS", 2),
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


def by_hand(config: Config, ranks: int = 1) -> ByHand:
    """The run as plain torch has it: one loop, or so many that take steps alone and average every `sync_every`.

    Draws in forward are keyed as ever, or no two loops could be compared.
    """
    from lockstep.training.assemble import build_model, load_data

    alone = World.single()
    train_set, _ = load_data(config, alone)
    pixels, targets = train_set.read(np.arange(SAMPLES), None)
    first = build_model(config, train_set)
    for name, parameter in first.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in config.model.freeze))
    loops = [_Loop(copy.deepcopy(first), config, ranks, rank) for rank in range(ranks)]
    average = copy.deepcopy(first) if config.optim.ema else None
    momentum = [torch.zeros_like(p.detach()) for p in first.parameters()]
    common = [p.detach().clone() for p in first.parameters()]
    order, losses, out, counted = Order(SAMPLES, BATCH, config.seed), [], [], 0
    for number in range(EPOCHS * order.steps_per_epoch):
        ids = order.step(*divmod(number, order.steps_per_epoch))
        before = [copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict())) for loop in loops]
        rows, (epoch, t) = torch.from_numpy(ids), divmod(number, order.steps_per_epoch)
        images, labels = _mixed(config, _seen(config, train_set, pixels[rows], ids, epoch), targets[rows], epoch, t)
        losses.append(sum(loop.step(number, ids, images, labels) for loop in loops) / len(ids))
        if config.on_nonfinite != "stop" and not all(loop.finite for loop in loops):
            out.append(number)
            for loop, (weights, state) in zip(loops, before, strict=True):
                loop.model.load_state_dict(weights)
                loop.optimizer.load_state_dict(state)
        elif average is not None:
            most = (1 + counted) / (10 + counted) if config.optim.ema_warmup else 1.0
            decay = min(config.optim.ema, most) if counted else 0.0
            counted += 1
            with torch.no_grad():
                for mine, p in zip(average.parameters(), loops[0].model.parameters(), strict=True):
                    mine.copy_(decay * mine + (1 - decay) * p)
        if (number + 1) % config.link.sync_every == 0 or (number + 1) % order.steps_per_epoch == 0:
            _exchange(loops, common, momentum, config)
    result = loops[0].model
    if average is not None:
        for mean, buffer in zip(average.buffers(), result.buffers(), strict=True):
            mean.copy_(buffer)
        result = average
    begun = first.state_dict()
    weights = {name: value.detach() for name, value in result.state_dict().items()}
    return ByHand(weights, distance(weights, begun), losses, out)


def _seen(config: Config, images: ImageSet, pixels: Tensor, ids: np.ndarray, epoch: int) -> Tensor:
    """A whole batch as it leaves the transforms, normalised."""
    found = transforms(config.data.augment, config.seed, images.shape, images.mean)
    shown = pixels if found is None else found(pixels, ids, epoch)
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
    """One process of the loop by hand."""

    def __init__(self, model: nn.Module, config: Config, ranks: int, rank: int) -> None:
        self.model, self.config, self.ranks, self.finite = model, config, ranks, True
        self.world = dataclasses.replace(World.single(), rank=rank, size=ranks)
        self.optimizer = optimizers.build(model, config.optim, config.lr)
        host = torch.device("cpu")
        self.autocast, self.scaler = autocast(config.precision, host), scaler(config.precision, host)
        self.draws = Draws(config.seed)

    def step(self, number: int, ids: np.ndarray, whole: Tensor, labels: Tensor) -> float:
        """Take one, of a global batch; returns the summed loss over this process's samples."""
        summed, exact = 0.0, self.config.exact
        pieces = micro_batches(len(ids), exact or self.config.accumulate, self.world, 1)
        pieces = pieces if any(p.size for p in pieces) else ()
        self.optimizer.zero_grad()
        for piece in pieces:
            mine = ids[piece.rows]
            if not len(mine):
                continue
            images = whole[piece.rows]
            torch.manual_seed(piece_seed(self.config.seed, number, piece.key))
            with keyed(self.draws, self.model, number, mine, images):
                with self.autocast():
                    outputs, targets = self.model(images), labels[piece.rows]
                    loss = F.cross_entropy(outputs, targets.to(outputs.dtype) if targets.ndim > 1 else targets)
                weighted = loss * (len(mine) * self.ranks / len(ids))
                (self.scaler.scale(weighted) if self.scaler else weighted).backward()
            summed += float(loss.detach()) * len(mine)
        for p in self.model.parameters():
            if p.grad is None and not pieces:
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


@torch.no_grad()
def _exchange(loops: list[_Loop], common: list[Tensor], momentum: list[Tensor], config: Config) -> None:
    """Weights, buffers and the optimizers' states become their means; with an outer step, Nesterov's towards them."""
    if config.link.sync_every == 1:
        return
    each: Callable[[Any], list[list[Tensor]]] = lambda of: [list(of(loop)) for loop in loops]  # noqa: E731
    _level(each(lambda loop: loop.model.parameters()))
    _level(each(lambda loop: (b for b in loop.model.buffers() if b.is_floating_point())))
    if config.link.inner_state == "averaged":
        _level(each(_state))
    outer_lr, mu = config.link.outer_lr, config.link.outer_momentum
    for i, start in enumerate(common):
        mean = list(loops[0].model.parameters())[i]
        way = start - mean
        momentum[i].mul_(mu).add_(way)
        new = start - outer_lr * (way + mu * momentum[i])
        for loop in loops:
            list(loop.model.parameters())[i].copy_(new)
        start.copy_(new)


def _state(loop: _Loop) -> Iterator[Tensor]:
    for p in loop.model.parameters():
        for key, value in sorted(loop.optimizer.state.get(p, {}).items()):
            if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                yield value


def _level(columns: list[list[Tensor]]) -> None:
    for tensors in zip(*columns, strict=True):
        mean = sum(tensors[1:], tensors[0]) / len(tensors)
        for tensor in tensors:
            tensor.copy_(mean)
