"""FSDP in exact mode gives DDP's bits."""

import dataclasses

import pytest

from lockstep.checkpoint.weights import digest
from lockstep.config import Config
from lockstep.parallel.sharded import is_sharded
from lockstep.processes.world import World
from lockstep.training.assemble import assemble
from lockstep.training.evaluation import evaluate
from tests.parallel.test_exact import BASE, changed
from tests.ranks import run_ranks

MODEL = {"model": "tests.parallel.test_exact:small_net"}
CASES = {
    "sgd, clipping, batch norm, dropout": BASE,
    "adamw, EMA": changed(optim={"optimizer": "adamw", "lr": 0.01, "ema": 0.9}, model=MODEL),
    "bf16": changed(precision="bf16", model=MODEL),
    "skip": changed(on_nonfinite="skip", model=MODEL),
    "fewer samples than slices in the last batch": changed(data={"fraction": 53 / 1437}, model=MODEL),
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
    return results


def with_strategy(config: Config, strategy: str) -> Config:
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, strategy=strategy))  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_the_bits_are_ddps_on_one_process(n: int) -> None:
    alone = run_ranks(trained, 1, "ddp", timeout=120)[0]
    for rank, results in enumerate(run_ranks(trained, n, "fsdp", timeout=120)):
        for name, result in results.items():
            assert result == alone[name], f"{name}: rank {rank} of {n}"
