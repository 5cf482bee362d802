"""Small moments of training to keep, and their comparison bit by bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.format import tensor_bytes
from lockstep.checkpoint.restore import Loaded, newest
from lockstep.checkpoint.store import folder_name, write
from lockstep.checkpoint.writer import snapshot
from lockstep.config import OptimConfig
from lockstep.training.optimizers import timm_optimizer

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd without state": lambda p: torch.optim.SGD(p, 0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(
        list[dict[str, Any]]([{"params": p[:1], "weight_decay": 0.0}, {"params": p[1:]}]), 0.01
    ),
    "adam, lr tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.01)),
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.01, max_iter=3, history_size=2),
    "muon": lambda p: timm_optimizer(OptimConfig("timm:muon", weight_decay=0.1), p, 0.01),
}


def model(seed: int = 0, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    return layers.to(dtype).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Steps with a gradient made of the weights and the step's number: a network's would take most of the time."""
    for step in range(first, last):

        @torch.no_grad()
        def closure(step: int = step) -> Any:
            generator = torch.Generator().manual_seed(step)
            for parameter in net.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.grad = torch.empty_like(parameter).copy_(parameter * 0.5 + noise)
            return torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum()

        optimizer.step(closure)
        for buffer in net.buffers():
            buffer.add_(1)


def tiny(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of four weights and its optimizer, whose every number says which step it is of."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    for parameter in net.parameters():
        parameter.data.fill_(value)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return net, optimizer


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written."""

    path: Path
    digest: str
    bytes: int


def keep(folder: Path, step: int, value: float | None = None) -> Written:
    """Write a tiny checkpoint of a step, with `value` (or the step) in every number."""
    value = step if value is None else value
    manifest = write(snapshot(step, *tiny(value), state={"step": step, "value": value}), folder)
    return Written(folder / folder_name(step), manifest.digest, sum(file.bytes for file in manifest.files.values()))


def good(folder: Path, digests: Mapping[int, str] | None = None) -> Loaded:
    """The newest good checkpoint; there has to be one."""
    loaded = newest(folder, digests)
    assert loaded is not None
    return loaded


def bits(value: Any) -> Any:
    """A tree with every tensor as (dtype, shape, bytes) and every float as its bits: equal means the same bits."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), tensor_bytes(value.detach().cpu()).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(item) for item in value]
    return (type(value).__name__, value.hex()) if isinstance(value, float) else (type(value).__name__, value)
