"""A run from outside: its folder, its checks before anything starts, and what each process does."""

import dataclasses
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.config import Config, Execution
from lockstep.errors import UserError, unknown
from lockstep.world import World


@dataclass(frozen=True)
class Evaluation:
    """What `lockstep eval` takes beside the run folder."""

    weights: Literal["best", "final"] = "best"
    """Which of the run's saved weights."""
    execution: Execution = field(default_factory=Execution)


def check(config: Config) -> None:
    """What can be known to be wrong before any process starts. Raises UserError."""
    from lockstep import models
    from lockstep.data.sources import DATASETS

    models.check(config.model.model)
    dataset = config.data.dataset
    if dataset not in DATASETS and ":" not in dataset:
        raise unknown("dataset", dataset, DATASETS, "Your own is package.module:factory.")


def claim_folder(config: Config) -> Path:
    """Make the run folder and write config.json there.

    Raises:
        UserError: where it holds a run already or can't be written.
    """
    execution = config.execution
    folder = Path(execution.out or f"runs/{config.recipe.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}")
    if not execution.out and folder.exists():  # two runs within a second
        folder = folder.with_name(f"{folder.name}-{os.getpid()}")
    if (folder / "journal.jsonl").exists():
        raise UserError(f"{folder} holds a run already", "Name another folder with --out, or remove that one.")
    try:
        (folder / "weights").mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the run folder {folder} can't be written: {error.strerror}", "Name another folder with --out."
        ) from error
    return folder


def read_config(folder: str) -> Config:
    """The config of a run folder. Raises UserError where there is none or it can't be read."""
    path = Path(folder) / "config.json"
    try:
        return Config.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no run folder: {path} can't be read ({error})", "Name the folder that --out named.") from error


def run(world: World, config: Config, claimed: str) -> None:
    """Train on this process, as one of the world's. `claimed`: the run folder, where the starting process made it."""
    from lockstep.training.loop import train

    mine = claimed or str(claim_folder(config)) if world.rank == 0 else ""
    folder = Path(world.gather(mine)[0])
    config.require_batch_for(world.size)
    progress = train(config, world, folder)
    if progress.metrics is not None:
        world.print(f"test accuracy {progress.metrics.top1:.2%} (top-1 on {progress.metrics.count:,} images)")
        world.print(f"run folder    {folder}")


def evaluate_run(world: World, config: Config, folder: str, chosen: Evaluation) -> None:
    """Evaluate saved weights on this process, as one of the world's."""
    from lockstep.checkpoint import weights
    from lockstep.training.assemble import build_model, eval_loader, load_data
    from lockstep.training.evaluation import evaluate
    from lockstep.training.precision import configure

    # chunks of the size that the run used: other shapes would round otherwise
    execution = dataclasses.replace(chosen.execution, eval_batch_size=config.execution.eval_batch_size)
    config = dataclasses.replace(config, execution=execution)
    configure(config.precision, world.device)
    train_set, val_set = load_data(config, world)
    model = build_model(config, train_set, world)
    weights.load(model, Path(folder) / "weights" / f"{chosen.weights}.safetensors")
    metrics = evaluate(model, eval_loader(config, val_set, world), world, config.precision)
    world.print(f"{chosen.weights} weights of {folder}: {metrics}")
