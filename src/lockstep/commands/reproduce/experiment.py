"""The records of all ranks as one experiment: what was trained on which global batches, and how."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.errors import UserError

_CLOSE = 1e-4  # of two numbers that float32 rounds differently


@dataclass(frozen=True)
class Step:
    """A global batch, its passes one after the other, in each the ranks' parts in their order."""

    ids: np.ndarray  # int64 [B]
    images: Tensor  # [B, ...], as the model got them
    labels: Tensor  # [B], or of soft ones [B, classes]
    loss: float  # the mean over all samples
    rates: list[float]  # of the optimizer's groups


@dataclass(frozen=True)
class Experiment:
    """What a script does. `record`: what rank 0 noted, for all that is the same on every rank."""

    script: Path
    world: int
    record: dict[str, Any]
    steps: list[Step]
    initial: dict[str, Tensor]
    parts: dict[str, Tensor]  # tensors that its objects were created with
    weight: Tensor | None  # of the classes, in the loss
    train: dict[str, Any]  # the loader that is learned from
    evaluated: dict[str, Any] | None  # the one that is not
    accumulate: int
    per_pass: int  # samples of one rank's forward pass
    loss_factor: float  # of the gradient, where the loss is not divided by the passes
    sampled: list[int]  # samples that each rank evaluated, or would

    @property
    def batch_size(self) -> int:
        """Global: samples of an optimizer's step."""
        return self.world * self.accumulate * self.per_pass

    @property
    def rates(self) -> list[float]:
        """The first group's rate at the beginning of each epoch."""
        later = [rates[0] for rates in self.train["rates"][1:] if rates]
        return [self.steps[0].rates[0], *later]  # of the first batch nobody knows the optimizer yet


def read(script: Path, folder: Path, records: list[dict[str, Any]]) -> Experiment:
    """The experiment that the records of a script's ranks describe.

    Raises:
        UserError: for what is not of the common shape: one model, one loader, one loop.
    """
    first = records[0]
    world = first["world"]
    if len(records) != world:
        raise UserError(
            f"{script.name} ran on {world} processes, of which {len(records)} left a record",
            "Start them all here: give --nproc, or no launcher's variables.",
        )
    problems = [problem for record in records for problem in record["problems"]]
    trained = [loader for loader in first["loaders"] if loader["trains"]]
    if len(trained) != 1:
        problems.append(f"{len(trained)} loaders are learned from")
    problems += _more_than_the_loss(first["steps"])
    if problems:
        raise UserError(
            f"{script.name} is not of the shape that can be reproduced: {'; '.join(dict.fromkeys(problems))}",
            "That is one model from images to logits, one DataLoader, one optimizer, and a cross-entropy of torch's.",
        )
    tensors = [load_file(folder / f"rank-{record['rank']}.safetensors") for record in records]
    count = min(len(record["steps"]) for record in records)
    steps = [_step(records, tensors, number) for number in range(count)]
    passes = first["steps"][0]["passes"]
    others = [loader for loader in first["loaders"] if not loader["trains"] and loader["passes"]]
    evaluated = max(others, key=lambda loader: loader["passes"], default=None)
    at = first["loaders"].index(evaluated) if evaluated else -1
    return Experiment(
        script=script,
        world=world,
        record=first,
        steps=steps,
        initial=_below(tensors[0], "initial/"),
        parts=_below(tensors[0], "parts/"),
        weight=tensors[0].get("weight"),
        train=trained[0],
        evaluated=evaluated,
        accumulate=len(passes),
        per_pass=len(passes[0]["ids"]),
        loss_factor=_factor(passes),
        sampled=[record["loaders"][at]["sampled"] for record in records] if evaluated else [],
    )


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def _step(records: list[dict[str, Any]], tensors: list[dict[str, Tensor]], number: int) -> Step:
    ids, images, labels = list[int](), list[Tensor](), list[Tensor]()
    summed = 0.0
    for at in range(len(records[0]["steps"][number]["passes"])):
        for record, theirs in zip(records, tensors, strict=True):
            one = record["steps"][number]["passes"][at]
            ids += one["ids"]
            images.append(theirs[f"images/{number}/{at}"])
            labels.append(theirs[f"labels/{number}/{at}"])
            summed += one["loss"] * len(one["ids"])
    rates = records[0]["steps"][number]["lr"]
    return Step(np.array(ids), torch.cat(images), torch.cat(labels), summed / len(ids), rates)


def _more_than_the_loss(steps: list[dict[str, Any]]) -> list[str]:
    """What is wrong where backward is called on another multiple of the loss each time: a penalty is in it."""
    passes = [one for step in steps for one in step["passes"]]
    ratios = [one["backward"] / one["loss"] for one in passes if one["loss"] and math.isfinite(one["backward"])]
    if not ratios or max(ratios) - min(ratios) <= _CLOSE * max(map(abs, ratios)):
        return []
    return [f"backward is called on more than the loss: something is added to it ({passes[0]['at']})"]


def _factor(passes: list[dict[str, Any]]) -> float:
    """What the gradient is of the mean's over all passes: their number, where the loss was not divided."""
    ratios = [one["backward"] / one["loss"] for one in passes if one["loss"]]
    if not ratios or not all(math.isfinite(ratio) for ratio in ratios):
        return 1.0
    factor = sum(ratios) / len(ratios) * len(passes)
    return 1.0 if abs(factor - 1) < _CLOSE else factor
