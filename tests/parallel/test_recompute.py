"""Activation checkpointing changes memory and nothing else; FSDP sends the weights in what autocast computes in."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig
from lockstep.config.fields import with_values
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.fsdp import whole
from lockstep.parallel.strategy import checkpoint_activations
from lockstep.training.assemble import assemble
from tests.parallel.test_sharded import Residual
from tests.ranks import run_ranks


class Drawing(Residual):
    """Draws in forward, by sample and by shard, and counts its passes in Python."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.passes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes.append(len(x))
        return nn.functional.dropout(super().forward(x), 0.3, self.training) * (1 + 0.1 * torch.rand(1, dtype=x.dtype))


def drawing(in_channels: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 3), Drawing(6), Drawing(6), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(24),
        nn.Linear(24, num_classes),
    )  # fmt: skip


BASE = Config(
    batch_size=8,
    data=DataConfig(dataset="digits", fraction=17 / 1437),  # 8, 8 and 1: on two, a rank without a sample
    model=ModelConfig(model=f"{__name__}:drawing"),
    optim=OptimConfig(lr=0.05),
)
FSDP = Execution(strategy="fsdp")
CASES = {
    "ddp": BASE,
    "accumulate": dataclasses.replace(BASE, accumulate=2),
    "groups": with_values(BASE, {"batch_norm": "groups:2"}),
    "fsdp": dataclasses.replace(BASE, execution=FSDP),
    "fsdp, bf16": dataclasses.replace(BASE, execution=FSDP, precision="bf16"),
    "exact": dataclasses.replace(BASE, exact=4),
}


def stepped(world: World, config: Config) -> tuple[dict[str, Any], list[list[int]], int]:
    """Weights and buffers after an epoch, what blocks counted, and the bytes that were saved for backward passes."""
    run, saved = assemble(config, world), 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    for batch in run.train.epoch(0):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run.step(batch)
    run.synchronize()
    state = {name: whole(value).detach().clone() for name, value in run.model.state_dict().items()}
    return state, [m.passes for m in run.model.modules() if isinstance(m, Drawing)], saved


def both(world: World) -> dict[str, str]:
    """What recomputing changes, by case."""
    wrong = {}
    for name, config in CASES.items():
        plain, passes, most = stepped(world, config)
        again, counted, less = stepped(world, with_values(config, {"activation_checkpointing": True}))
        if unlike := [key for key in plain if not torch.equal(plain[key], again[key])]:
            wrong[name] = f"{unlike}"
        elif not config.exact and (passes != counted or less >= most):  # its slices go to threads as these are free
            wrong[name] = f"{passes} {counted} passes, {most} {less} bytes"
    return wrong


@pytest.mark.slow
def test_what_is_computed_again_is_the_same_to_the_bit() -> None:
    assert run_ranks(both, 3, timeout=300) == [{}] * 3


def test_a_model_without_blocks_is_told() -> None:
    with pytest.raises(UserError, match="--activation-checkpointing: Linear has no blocks"):
        checkpoint_activations(nn.Linear(2, 2))
    with pytest.raises(UserError, match="--activation-checkpointing with --compile"):
        Config(model=ModelConfig(compile=True, activation_checkpointing=True))
