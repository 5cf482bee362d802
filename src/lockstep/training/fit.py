"""How many micro-batches fit the device: `--accumulate auto`, found by trying. The batch stays what it is.

Each process tries alone, on its own device and without collectives (a rank that runs out of memory in the midst of one
would leave the others waiting), with as many images as its largest share of a micro-batch will have; the ranks then
take the largest number that any of them needs.
"""

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.store import steps
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.processes.memory import free_bytes, peak_gib
from lockstep.processes.world import World
from lockstep.training.assemble import assemble, load_data
from lockstep.watch.records import FitRecord

_STEPS = 2  # the optimizer's state is there from the first one on
_HEADROOM = 0.95  # of the device's memory, for what fragments and for the library that talks to the others

Attempt = Callable[[Config, World], float]  # GiB that the step of a trial config took; torch.OutOfMemoryError


def fitted(config: Config, world: World, folder: Path) -> tuple[Config, FitRecord | None]:
    """The config with a number of micro-batches, and what was tried; all ranks call it together.

    Where the run goes on, the number is the one that it began with. On a CPU, where no memory is tried, it is 1.

    Raises:
        UserError: where the device holds no step of one image for each process.
    """
    if config.accumulate > 0:
        return config, None
    kept = world.gather(_kept(config, folder) if world.rank == 0 else 0)[0]
    if kept:
        return replace(config, accumulate=kept), None
    if not tries(world):
        return replace(config, accumulate=1), FitRecord(kind="fit", accumulate=1, tried=[], peak_gib=0.0, free_gib=0.0)
    load_data(config, world)  # one process of a machine downloads what is missing
    free, tried = free_bytes_gib(world), list[int]()
    count = 1
    while True:
        trial = _with_room(config, count, world, tried)
        tried.append(count)
        peak = _taken(trial, world, free)
        if not world.largest([int(peak is None)])[0]:
            peaks = world.gather(round(peak or 0.0, 3))
            return trial, FitRecord(kind="fit", accumulate=count, tried=tried, peak_gib=max(peaks), free_gib=free)
        count *= 2


def tries(world: World) -> bool:
    """Whether this kind of device runs out of memory in a way that one survives."""
    return world.device.type != "cpu"


def free_bytes_gib(world: World) -> float:
    """What the device has free, in GiB; the least of all ranks'."""
    mine = free_bytes(world.device) / 2**30 if world.device.type != "cpu" else 0.0
    return float(min(world.gather(round(mine, 3))))


def line(record: FitRecord) -> str:
    """What is said of it."""
    if not record["tried"]:
        return "--accumulate auto: 1, as memory is not tried on a CPU"
    tried = ", ".join(map(str, record["tried"]))
    return (
        f"--accumulate auto: {record['accumulate']} micro-batch(es), tried {tried}; a step takes "
        f"{record['peak_gib']:.2f} of {record['free_gib']:.2f} GiB"
    )


def _with_room(config: Config, count: int, world: World, tried: list[int]) -> Config:
    try:
        trial = replace(config, accumulate=count)
        trial.require_batch_for(world.size)
        return trial
    except UserError as error:
        raise UserError(
            f"--accumulate auto: a batch of {config.batch_size} in {max(tried, default=1)} micro-batches needs more "
            "memory than the device has free",
            "Use a smaller model or --image-size, --activation-checkpointing, or --strategy fsdp.",
        ) from error


def _taken(trial: Config, world: World, free_gib: float) -> float | None:
    """GiB that steps of this rank's share take, alone; None where they don't fit."""
    try:
        peak = attempt(trial, world)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if world.device.type != "cpu":
            torch.accelerator.empty_cache()
    return peak if not free_gib or peak <= _HEADROOM * free_gib else None


def attempt(trial: Config, world: World) -> float:
    """Take steps over this rank's largest share of a micro-batch, twice in a step where there are several."""
    share = -(-trial.batch_size // (trial.accumulate * world.size))
    passes = min(2, trial.accumulate)  # the second has the first one's gradients beside it
    alone = replace(
        trial,
        batch_size=share * passes,
        samples=trial.samples.for_batch(share * passes),
        accumulate=passes,
        link=type(trial.link)(),
        execution=replace(trial.execution, strategy="ddp", nproc=1, nnodes=1, loader="streaming", workers=0),
    )
    single = World.single(world.device)
    if world.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(world.device)
    run = assemble(alone, single)
    run.enter(0)
    for number, batch in enumerate(run.train.epoch(0)):
        run.step(batch)
        if number + 1 == _STEPS:
            break
    gradients = sum(p.numel() * p.element_size() for p in run.model.parameters() if p.requires_grad) / 2**30
    return peak_gib(world.device) + (gradients if world.size > 1 else 0.0)  # DDP's buckets


def _kept(config: Config, folder: Path) -> int:
    """The number that the run began with, where it goes on; 0 where it begins."""
    named = config.recovery.resume
    places = [folder] if named in ("auto", "never") else [folder, Path(named), Path(named).parent.parent]
    for place in places:
        if not steps(place / "checkpoints") or not (place / "config.json").is_file():
            continue
        try:
            values: Any = json.loads((place / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # damaged: the checkpoint's own config has the last word
            continue
        found = values.get("accumulate") if isinstance(values, dict) else 0
        if type(found) is int and found > 0:
            return found
    return 0
