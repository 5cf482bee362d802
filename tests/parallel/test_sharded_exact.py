"""FSDP in exact mode gives DDP's bits."""

import dataclasses

import pytest
from torch import Tensor, nn

from lockstep.checkpoint.weights import digest
from lockstep.config import Config, DataConfig, ModelConfig, OptimConfig
from lockstep.errors import UserError
from lockstep.parallel.sharded import is_sharded
from lockstep.processes.world import World
from lockstep.training.assemble import assemble
from lockstep.training.evaluation import evaluate
from tests.parallel.test_exact import BASE, changed
from tests.ranks import run_ranks


class Depthwise(nn.Module):
    """A block, so a unit of FSDP's, that begins with a convolution whose kernel its input's strides choose."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.mix = (
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            nn.Linear(channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Permuted(nn.Module):
    """Normalises over channels that lie last in memory, as ConvNeXt does, and hands its blocks a permuted view."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(in_channels, 24, 1), nn.LayerNorm(24)
        self.blocks, self.head = nn.Sequential(Depthwise(24), Depthwise(24)), nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        out: Tensor = self.head(self.blocks(x).mean(dim=(2, 3)))
        return out


class Skipping(Permuted):
    """Uses its first block's input once more, which that block uses twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        out: Tensor = self.head((self.blocks(x) + x).mean(dim=(2, 3)))
        return out


MODEL = {"model": "tests.parallel.test_exact:small_net"}
SKIPPING = {"model": "tests.parallel.test_sharded_exact:Skipping"}
CASES = {
    "sgd, clipping, batch norm, dropout": BASE,
    "adamw, EMA": changed(optim={"optimizer": "adamw", "lr": 0.01, "ema": 0.9}, model=MODEL),
    "bf16": changed(precision="bf16", model=MODEL),
    "class weights, frozen biases": changed(
        data={"fraction": 53 / 1437},
        optim={"class_weights": "1,2,1,3,1,1,4,1,1,0.5", "clip_norm": 0.5},
        model={**MODEL, "freeze": ("*.bias",)},
    ),
    "skip": changed(on_nonfinite="skip", model=MODEL),
    "fewer samples than slices in the last batch": changed(data={"fraction": 53 / 1437}, model=MODEL),
    "a view with a sample alone": Config(
        batch_size=7,  # slices of two samples and of one, whose strides nobody needs
        exact=5,
        data=DataConfig(dataset="digits", fraction=14 / 1437),
        model=ModelConfig(model="tests.parallel.test_sharded_exact:Permuted"),
        optim=OptimConfig(optimizer="sgd", lr=0.1),
    ),
}


def trained(world: World, strategy: str) -> dict[str, tuple[str, ...]]:
    """Digests of the weights and of the average, loss totals, metrics; by case."""
    results: dict[str, tuple[str, ...]] = {}
    for name, config in CASES.items():
        run = assemble(with_strategy(config, strategy), world)
        assert is_sharded(run.model) == (strategy == "fsdp")
        losses = []
        for batch in run.train.epoch(0):
            losses.append(world.sum(run.step(batch).double()).item())
            if run.ema is not None:
                run.ema.update_parameters(run.model)
        run.synchronize()
        metrics = evaluate(run.evaluated, run.val, world, config.precision, synchronized=True)
        results[name] = digest(run.model), digest(run.evaluated), repr(losses), repr(metrics)
    if strategy == "fsdp":
        run = assemble(with_strategy(changed(model=SKIPPING), strategy), world)
        with pytest.raises(UserError, match=r"blocks.0 uses an input 2 times, and 1 more use it"):
            run.step(next(run.train.epoch(0)))
    return results


def with_strategy(config: Config, strategy: str) -> Config:
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, strategy=strategy))  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_bits_are_ddps_on_one_process(n: int) -> None:
    alone = run_ranks(trained, 1, "ddp", timeout=120)[0]
    for rank, results in enumerate(run_ranks(trained, n, "fsdp", timeout=120)):
        for name, result in results.items():
            assert result == alone[name], f"{name}: rank {rank} of {n}"
