"""What is done with samples changes nothing between numbers of ranks: mixing, balance, repeats, weights of classes.

Exact: one digest on N = 1 and 3. Plain: in float64 equal to 1e-10 over N and micro-batches.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.weights import digest
from lockstep.config import Config, DataConfig, ModelConfig, OptimConfig
from lockstep.config.fields import with_values
from lockstep.data.order import EMPTY_LEDGER, extend_ledger
from lockstep.distributed.world import World
from lockstep.parallel.buffers import average_buffers
from lockstep.training.assemble import assemble
from tests.ranks import run_ranks


def rare() -> Any:
    """53 grey images of three classes of 34, 14 and 5: the last batch has one sample, fewer than ranks."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 34 + [1] * 14 + [2] * 5)[torch.randperm(53, generator=generator)]
    pixels = torch.randint(0, 256, (53, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return (pixels, labels), (pixels[:20], labels[:20])


def several() -> Any:
    """The same images, each of none to three of three classes."""
    (pixels, labels), _ = rare()
    classes = torch.stack([labels < 2, (labels + pixels[:, 0, 0, 0]) % 2 == 0, pixels[:, 0, 0, 1] > 128], 1)
    return (pixels, classes), (pixels[:20], classes[:20])


class Doubled(nn.Module):
    """Computes in float64, with batch norm and dropout."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(144, num_classes),
        ).double()  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.double())


BASE = Config(
    batch_size=13,
    epochs=2,
    data=DataConfig(dataset=f"{__name__}:rare", crop_padding=1, flip=True),
    model=ModelConfig(model=f"{__name__}:Doubled"),
    optim=OptimConfig(lr=0.1, momentum=0.9, clip_norm=1.0),
)


MIXED = {"mixup": 0.4, "cutmix": 1.0}
VALUES: dict[str, dict[str, Any]] = {
    "mixed": MIXED,
    "mixup, label smoothing": {"mixup": 0.2, "label_smoothing": 0.1},
    "weighted, smoothed": {"class_weights": "auto", "label_smoothing": 0.1},
    "weighted bce, mixed": {**MIXED, "loss": "bce", "class_weights": "effective:0.9"},
    "weighted focal, mixed": {**MIXED, "loss": "focal:1.5", "class_weights": "1,2.5,8"},
    "balanced, cutmix": {"cutmix": 1.0, "balance": "equal"},
    "balanced by roots, repeated": {"batch_size": 12, "balance": "sqrt", "aug_repeats": 2},
    "several labels, mixed": {**MIXED, "dataset": f"{__name__}:several", "loss": "bce", "label_smoothing": 0.1},
    "repeated, mixed": {"batch_size": 12, "aug_repeats": 3, **MIXED},
}
CASES: dict[str, Config] = {name: with_values(BASE, values) for name, values in VALUES.items()}
MORE = ("mixed",)  # with other precisions and batch norms too


def trained(world: World, config: Config) -> tuple[str, list[float], dict[str, np.ndarray]]:
    """Digest of the weights and the ledger, all steps' losses and the weights themselves."""
    run = assemble(config, world)
    losses, ledger = [], EMPTY_LEDGER
    for epoch in run.train.epochs(config.epochs):
        for batch in epoch:
            losses.append(run.step(batch).item())
            ledger = extend_ledger(ledger, batch.all_ids)
    if not config.exact:
        average_buffers(run.model, world.size)
    weights = {name: value.numpy() for name, value in run.model.state_dict().items()}
    return digest(run.model) + ledger.hex(), losses, weights


def everything(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, config in CASES.items():
        found["exact", name] = trained(world, dataclasses.replace(config, exact=5))[:2]
        # statistics over all ranks are those of a micro-batch, so those of groups where that is not the whole batch
        plain = with_values(config, {"batch_norm": "groups:2"})
        found[3, name] = trained(world, dataclasses.replace(plain, accumulate=3))[:0:-1]
        if world.size == 1:
            found["in one piece", name] = trained(world, plain)[:0:-1]
        if name in MORE:
            found[1, name] = trained(world, config)[:0:-1]
    for name in MORE:
        low = dataclasses.replace(CASES[name], exact=5, precision="bf16")
        found["bf16", name] = trained(world, low)[:2]
    return found


@pytest.mark.slow(20)
def test_one_result_on_any_number_of_ranks() -> None:
    alone = run_ranks(everything, 1, timeout=240)[0]
    digests = [alone["exact", name][0] for name in CASES]
    assert len(set(digests)) == len(digests)  # the cases do differ
    for name in CASES:
        _require_close(alone[3, name], alone["in one piece", name], f"{name}: three micro-batches beside one")
    for rank, found in enumerate(run_ranks(everything, 3, timeout=240)):
        for key, (weights, losses) in found.items():
            where = f"{key}: rank {rank} of 3"
            if isinstance(key[0], str):
                assert weights == alone[key][0], where
                np.testing.assert_allclose(losses, alone[key][1], rtol=1e-10, err_msg=where)
            else:
                _require_close((weights, losses), alone[key], where)


def _require_close(found: Any, expected: Any, where: str) -> None:
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-10, err_msg=where)
    for name, value in expected[0].items():
        np.testing.assert_allclose(found[0][name], value, rtol=1e-10, atol=1e-10, err_msg=f"{where} {name}")
