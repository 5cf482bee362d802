"""Small classifiers of [b, 1, 9, 9] that keep state, or compute, in unusual ways."""

import math
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PIXELS, CLASSES = 81, 7


def mlp() -> nn.Module:
    """Its slices begin at any address: 81 floats a sample."""
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 33), nn.ReLU(), nn.Linear(33, CLASSES))


class Reassigning(nn.Module):
    """A centre that is a new tensor after each pass, its graph attached."""

    center: Tensor
    mask: Tensor
    highest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(PIXELS, CLASSES)
        self.register_buffer("center", torch.zeros(PIXELS))
        self.register_buffer("mask", torch.zeros(CLASSES).index_fill_(0, torch.tensor(0), -math.inf))
        self.register_buffer("highest", torch.tensor(-math.inf))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        self.center = 0.9 * self.center + 0.1 * (x * self.linear.weight[0]).mean(0)
        self.highest = torch.maximum(self.highest, x.detach().max())
        return self.linear(x - self.center) + self.mask.exp()


class ActNorm(nn.Module):
    """Scale and shift are those of the first batch: by a flag, in buffers; with counters of other types."""

    seen: Tensor
    batches: Tensor
    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(PIXELS, CLASSES)
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("shift", torch.zeros(PIXELS))
        self.register_buffer("classes", torch.zeros(CLASSES, dtype=torch.bool))
        self.register_buffer("batches", torch.zeros((), dtype=torch.uint8))
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if not self.seen:
            self.shift.copy_(x.mean(0))
            self.seen.fill_(True)
        y = self.linear(x - self.shift)
        self.classes[y.argmax(1)] = True
        self.batches += 1
        self.phase = self.phase * torch.complex(x.mean(), x.abs().mean())
        return y


class Complex(nn.Module):
    """A complex parameter, one with gaps, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(9, 5, dtype=torch.complex64))
        whole = nn.Conv2d(3, 5, 3).weight
        self.part = nn.Parameter(whole[:, :1])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(5 * 49, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft2(torch.fft.rfft2(x.float()) * self.spectrum, s=(9, 9)).to(x.dtype)
        return self.linear(nn.functional.conv2d(x, self.part).flatten(1) * self.gain)


class Twice(nn.Module):
    """A layer that is used twice under checkpointing: reentrant, its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(PIXELS, 32), nn.Linear(32, 32)
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for _ in range(2):
            x = checkpoint(lambda y: self.shared(y).relu(), x, use_reentrant=True)
        return self.last(x)


class Drawing(nn.Module):
    """Noise from the generators of torch, numpy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(PIXELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.standard_normal((len(x), PIXELS))).float()
        return self.linear(x.flatten(1) + noise * random.random()) * (1 + torch.rand(()))


def dropping() -> nn.Module:
    """Its draws are keyed by sample, so its slices may go side by side."""
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, CLASSES))


class Generated(nn.Module):
    """Layers, and what they do to their buffers, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        width = draw.choice([7, 16, 33])
        self.first, self.last = nn.Linear(PIXELS, width), nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=draw.random() < 0.5) for _ in range(draw.randint(1, 3))
        )
        self.order = [draw.randrange(len(self.layers)) for _ in range(draw.randint(1, 4))]  # some twice, some never
        self.norm = draw.choice([nn.LayerNorm, nn.Identity])(width)
        self.drop = nn.Dropout(draw.choice([0.0, 0.3]))
        self.kinds = [draw.choice(["in place", "re-assigned", "by data", "flag", "count"]) for _ in range(3)]
        for i, kind in enumerate(self.kinds):
            dtype = {"flag": torch.bool, "count": draw.choice([torch.uint8, torch.int64])}.get(kind)
            start = draw.choice([0.0, -0.0, math.inf, -math.inf]) if dtype is None else 0
            self.register_buffer(f"state{i}", torch.full((width,), start, dtype=dtype or torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for i, kind in enumerate(self.kinds):
            state, mean = self.get_buffer(f"state{i}"), x.detach().float().mean(0)
            finite = torch.where(state.isfinite(), state, 0).to(mean.dtype)
            match kind:
                case "in place":
                    state.copy_(torch.where(mean > 0, 0.9 * finite + mean, state))
                case "re-assigned":
                    setattr(self, f"state{i}", torch.lerp(finite, mean, 0.1))
                case "by data":
                    state.data[0] = mean[0]
                case "flag":
                    state |= mean > 0.1
                case "count":
                    state += 1
            x = x + 0.01 * finite
        for i in self.order:
            x = self.drop(torch.relu(self.layers[i](x)))
        return self.last(self.norm(x))


class Counting(nn.Module):
    """Counts its passes, scales by their number, and trains its first layer after the second step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(PIXELS, 12).requires_grad_(False), nn.Linear(12, CLASSES)
        self.passes, self.tally = 0, {"passes": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.tally["passes"] += 1
        if self.passes == 2:
            self.first.requires_grad_(True)
        return self.head(torch.tanh(self.first(x.flatten(1)))) * self.passes / (1 + self.tally["passes"])


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "re-assigned buffers, infinities": Reassigning,
    "first batch by a flag, complex buffer": ActNorm,
    "complex parameter, one with gaps": Complex,
    "reentrant checkpoint, a layer twice": Twice,
    "three generators": Drawing,
    "dropout": dropping,
    "counters, a layer frozen at first": Counting,
    **{f"generated {seed}": partial(Generated, seed) for seed in range(6)},
}
