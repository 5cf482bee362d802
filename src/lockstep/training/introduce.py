"""What a run says of itself at the start: the journal's `run` record and a few lines for the person who started it."""

import os
import platform
from typing import Any

import torch
import torchvision

import lockstep
from lockstep.config import Config
from lockstep.training.assemble import Run, unsynchronised_batchnorm
from lockstep.world import World, device_name


def describe(config: Config, world: World, run: Run) -> dict[str, Any]:
    """The journal's `run` record: what runs, where, on what. All ranks call it together."""
    return {
        "config": config.to_dict(),
        "world": {"size": world.size, "local_size": world.local_size, "backend": world.backend},
        "pids": world.gather(os.getpid()),
        "device": device_name(world.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "lockstep": lockstep.__version__,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "python": platform.python_version(),
        },
        "data": {"name": run.train.images.name, "fingerprint": run.train.images.fingerprint},
        "parameters": sum(p.numel() for p in run.model.parameters()),
    }


def introduce(config: Config, world: World, run: Run) -> list[str]:
    """Lines about what is going to happen, and what of it depends on the number of processes."""
    optim, order = config.optim, run.train.order
    per_rank = -(-config.batch_size // world.size)
    lines = [
        f"{config.recipe}: {config.model.model} on {run.train.images.name}, "
        f"{order.samples_per_epoch:,} images an epoch, "
        f"batch {config.batch_size} = {world.size} process(es) x {per_rank} on {world.device.type}, {config.precision}"
    ]
    if config.shards:
        lines.append(
            f"exact mode: {config.shards} shards; the same weights, bit by bit, on 1 to {config.shards} processes"
        )
    if optim.scale_lr != "none":
        lines.append(
            f"learning rate {optim.lr:g} scaled {optim.scale_lr} by batch {config.batch_size} / "
            f"{optim.base_batch_size or config.batch_size} = {config.lr:g}"
        )
    if not config.shards and unsynchronised_batchnorm(run.model, world):
        lines.append(
            "note: batch norm takes its statistics over each process's own share, so results depend a little on "
            "--nproc; --sync-bn takes them over the whole batch, --shards makes every bit the same"
        )
    return lines
