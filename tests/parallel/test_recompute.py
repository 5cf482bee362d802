"""Activation checkpointing changes memory and nothing else; FSDP sends the weights in what autocast computes in."""

import dataclasses
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.fsdp import is_part, whole
from lockstep.parallel.strategy import checkpoint_activations
from lockstep.training.assemble import assemble
from tests.parallel.test_sharded import Residual
from tests.ranks import run_ranks


class Drawing(Residual):
    """Draws in forward, by sample and by piece, and counts its passes in Python."""

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
    "groups": dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, batch_norm="groups:2")),
    "fsdp": dataclasses.replace(BASE, execution=FSDP),
    "fsdp, bf16": dataclasses.replace(BASE, execution=FSDP, precision="bf16"),
    "stages": dataclasses.replace(BASE, execution=Execution(model_parallel=2)),
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


def recomputed(config: Config) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, activation_checkpointing=True))


def both(world: World) -> dict[str, str]:
    """What recomputing changes, by case."""
    wrong = {}
    for name, config in CASES.items():
        plain, passes, most = stepped(world, config)
        again, counted, less = stepped(world, recomputed(config))
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


class Counting:
    """FSDP's all-gather, counted."""

    def __init__(self) -> None:
        self.bytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> Any:
        self.bytes += output_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, **how)


def travelled(world: World) -> dict[str, Any]:
    """The bytes that FSDP gathers in a step, in which types a block holds its weights, and what a rank owns."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        run = assemble(dataclasses.replace(BASE, execution=FSDP, precision=precision), world)
        counting, kinds = Counting(), dict[str, torch.dtype]()
        for module in run.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(cast(Any, counting))

        def note(module: nn.Module, args: Any, kinds: dict[str, torch.dtype] = kinds) -> None:
            del args
            kinds.update({f"{type(module).__name__}.{name}": p.dtype for name, p in module.named_parameters()})

        for module in run.model.modules():
            if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.LayerNorm | nn.Linear):
                module.register_forward_pre_hook(note)
        run.step(next(run.train.epoch(0)))
        owned = {p.dtype for p in run.model.parameters() if is_part(p)}
        state = {v.dtype for s in run.step.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)}
        found[precision] = counting.bytes, kinds, owned | state
    return found


def test_weights_travel_in_what_autocast_computes_in_and_are_owned_in_float32() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for rank in run_ranks(travelled, 2):
        (whole_bytes, kinds, _), (half, lowered, owned) = rank["fp32"], rank["bf16"]
        assert set(kinds.values()) == owned == {torch.float32}
        low = {name for name, dtype in lowered.items() if dtype == torch.bfloat16}
        assert lowered.keys() == kinds.keys() > low, "norms are there, and in float32"
        if hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
            assert low == {"Conv2d.weight", "Conv2d.bias", "Linear.weight", "Linear.bias"}
            assert 0 < half < 0.6 * whole_bytes, "most of this model is convolutions"
        else:  # torch before 2.15 has no say by parameter, and norms' weights have to stay: all go in float32
            assert not low
            assert 0 < half == whole_bytes
