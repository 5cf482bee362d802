"""Frozen layers keep their bits on any number of processes."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.weights import digest
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery
from lockstep.config.fields import with_values
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import Run, assemble
from lockstep.training.freezing import freeze
from lockstep.training.loop import steps
from lockstep.training.state import State
from tests.ranks import alone, run_ranks


class Net(nn.Sequential):
    """Takes images in the type of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(next(self.parameters()).dtype))


def net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    del image_size
    model = Net()
    for name, into, out in (("stem", in_channels, 4), ("middle", 4, 6), ("top", 6, 6)):
        block = nn.Sequential(nn.Conv2d(into, out, 3, bias=False, padding=1), nn.BatchNorm2d(out), nn.ReLU())
        model.add_module(name, block)
    model.add_module("flat", nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()))
    model.add_module("drop", nn.Dropout(0.1))
    model.add_module("head", nn.Linear(24, num_classes))
    return model


PLAIN = Config(
    batch_size=20,
    epochs=2,
    data=DataConfig(dataset="digits", fraction=0.06, flip=True),  # 86 samples: 5 steps, the last of 6
    model=ModelConfig(model="tests.training.test_freezing:net", freeze_until="middle"),
    optim=OptimConfig(optimizer="adamw", lr=0.01, weight_decay=0.05, clip_norm=1.0, ema=0.9),
    execution=Execution(device="cpu", loader="resident", log_every=3, eval_batch_size=200, eval_every=3),
    recovery=Recovery(checkpoint_every="1steps", check_every=2, hang_timeout=60),
)
EXACT, MUON = dataclasses.replace(PLAIN, exact=4), with_values(PLAIN, {"optimizer": "timm:muon"})
STEPS = 15


def changed(config: Config, world: World, dtype: torch.dtype | None = None) -> tuple[list[set[str]], Run]:
    """The names of what has changed in the model by the end of each epoch."""
    run, state = assemble(config, world, dtype), State()
    found, kept = [], bits(run)
    for _ in range(config.epochs):
        for _ in steps(run, state, lambda _: None):
            pass
        state.epochs += 1
        now = bits(run)
        found.append({name for name in now if not torch.equal(now[name], kept[name])})
        kept = now
    return found, run


def bits(run: Run) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}


HEAD = {"head.weight", "head.bias"}
NORM = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}


def block(name: str) -> set[str]:
    return {f"{name}.{each}" for each in {"0.weight", *NORM}}


def of_all_ways(world: World) -> dict[str, Any]:
    """By way of training: what moves in each epoch, and the weights at the end."""
    found: dict[str, Any] = {}
    for name, config in {"exact": EXACT, "plain": PLAIN, "muon": MUON}.items():
        moved, run = changed(config, world, None if config.exact else torch.float64)
        found[name] = moved, [p.detach().double().numpy() for p in run.model.state_dict().values()]
        optimizer = run.step.optimizer
        stem = [p for n, p in run.model.named_parameters() if n.startswith("stem")]
        assert not any(p.requires_grad or p.grad is not None or p in optimizer.state for p in stem)
        found[f"digest, {name}"] = digest(run.evaluated)
    return found


def test_what_is_frozen_keeps_its_bits_and_n_changes_nothing() -> None:
    one = alone(of_all_ways)
    for name in ("exact", "plain", "muon"):
        assert one[name][0] == [HEAD | block("top") | block("middle")] * 2, name
    for found in run_ranks(of_all_ways, 3, timeout=180):  # two processes: below
        assert found["digest, exact"] == one["digest, exact"]
        for name in ("exact", "plain", "muon"):
            assert found[name][0] == one[name][0], name
        for ours, theirs in zip(found["plain"][1], one["plain"][1], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("flags", "frozen", "norms"),
    [
        ({"freeze": ("stem",)}, {"stem.0.weight", "stem.1.weight", "stem.1.bias"}, {"stem.1"}),
        ({"freeze": ("[sm]*.0",)}, {"stem.0.weight", "middle.0.weight"}, set()),
        ({"freeze": ("*.bias",)}, {"stem.1.bias", "middle.1.bias", "top.1.bias", "head.bias"}, set()),
        ({"freeze": ("*.1",)}, {f"{b}.1.{p}" for b in ("stem", "middle", "top") for p in ("weight", "bias")}, 3),
        (
            {"freeze_until": "middle.1"},
            {"stem.0.weight", "stem.1.weight", "stem.1.bias", "middle.0.weight"},
            {"stem.1"},
        ),
        ({"freeze": ("head",), "freeze_until": "middle"}, {"stem.0.weight", "stem.1.weight", "stem.1.bias", *HEAD}, 1),
    ],
)
def test_names_and_patterns(flags: dict[str, Any], frozen: set[str], norms: Any) -> None:
    model = net(1, 10, 8)
    found = freeze(model, ModelConfig(**flags))
    assert frozen == {n for n, p in model.named_parameters() if not p.requires_grad}
    still = {n for n, m in model.named_modules() if not m.training}
    assert (still == norms) if isinstance(norms, set) else len(still) == norms
    assert f"frozen: {len(frozen)} of 11 parameters" in found[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"freeze": ("stam",)}, "unknown layer in --freeze 'stam'\n  Did you mean stem"),
        ({"freeze_until": "midle"}, "unknown layer in --freeze-until 'midle'\n  Did you mean middle"),
        ({"freeze_until": "stem"}, "nothing comes before it"),
        ({"freeze": ("*",)}, "--freeze * leaves nothing of Net to train\n  .*head"),
    ],
)
def test_what_names_nothing_or_everything_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("*", "[*]").replace(".[*]", ".*")):
        freeze(net(1, 10, 8), ModelConfig(**flags))


def test_what_a_model_has_frozen_itself_stays_so() -> None:
    model = net(1, 10, 8)
    stem: Any = model.get_submodule("stem")
    stem[0].weight.requires_grad_(False)
    freeze(model, ModelConfig(freeze=("stem",)))
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {
        f"stem.{n}" for n in ("0.weight", "1.weight", "1.bias")
    }
