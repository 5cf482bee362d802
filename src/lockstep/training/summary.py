"""What stands at the start of a run: the journal's `run` record, and a few lines on the console."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version

import torch
import torchvision

from lockstep.config import Config
from lockstep.distributed.devices import device_name
from lockstep.distributed.rendezvous import listening
from lockstep.distributed.world import World
from lockstep.monitoring.hang import name_ranks
from lockstep.monitoring.journal import RunRecord
from lockstep.parallel.batchnorm import batch_norms, local_batch_norms
from lockstep.training.assemble import Run


def run_record(config: Config, world: World, run: Run, resumed_from: int, notes: list[str]) -> RunRecord:
    """The journal's `run` record: what runs, where, on what. All ranks call it together."""
    return RunRecord(
        kind="run",
        config=config.to_dict(),
        world={"size": world.size, "local_size": world.local_size, "backend": world.backend},
        pids=world.gather(os.getpid()),
        devices=world.gather(device_name(world.device)),
        threads=max(torch.get_num_threads(), run.step.sync.at_once),
        versions=versions(),
        data={"name": run.train.images.name, "fingerprint": run.train.images.fingerprint},
        parameters=sum(p.numel() for p in run.model.parameters()),
        steps_per_epoch=len(run.train),
        resumed_from=resumed_from,
        notes=notes,
    )


def versions() -> dict[str, str]:
    """What computes here, with its version."""
    return {
        "lockstep": version("lockstep-torch"),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
    }


def _strategy(config: Config, world: World) -> Iterator[str]:
    """Where parts of the model are, if not all of it is everywhere, and what of the law a strategy gives up."""
    execution, compress = config.execution, config.comm.compress
    if execution.strategy == "fsdp" and world.size > 1:
        yield f"each process holds 1/{world.size} of weights, gradients and optimizer state"
    if world.size > 1 and compress != "none":
        yield f"note: gradients are sent as {compress}: results differ by that rounding, also with --nproc"


def summary(config: Config, world: World, run: Run) -> list[str]:
    """Lines about what is going to happen, and what of it depends on the number of processes."""
    optim, order = config.optim, run.train.order
    per_rank = -(-config.batch_size // world.size)
    lines = [
        f"{config.recipe}: {config.model.model} on {run.train.images.name}, "
        f"{order.samples_per_epoch:,} images an epoch, "
        f"batch {config.batch_size} = {world.size} process{'es' * (world.size > 1)} x {per_rank} "
        f"on {world.device.type}, {config.precision}"
    ]
    reachable = listening(world.size, world.local_size, os.environ)
    # who else may reach it is for every user to know
    if reachable and (config.execution.verbose or world.size > world.local_size):
        lines.append(reachable)
    for images in (run.train.images, run.val.images):
        if left_out := getattr(images, "left_out", ""):
            lines.append(f"note: in {images.name} these files were taken for no images: {left_out}")
    if config.exact:
        v = config.exact
        lines.append(f"exact mode: {v} slices; the same weights, bit by bit, on 1 to {v} processes")
    lines += _strategy(config, world)
    if optim.scale_lr != "none":
        lines.append(
            f"learning rate {optim.lr:g} scaled {optim.scale_lr} by batch {config.batch_size} / "
            f"{optim.base_batch_size} = {config.lr:g}"
        )
    return lines + _unequal(world.gather(device_name(world.device))) + _statistics(config, world, run)


def _unequal(names: list[str]) -> list[str]:
    """A line where the ranks' devices, by their names, are of several kinds."""
    kinds = {name: [rank for rank, theirs in enumerate(names) if theirs == name] for name in dict.fromkeys(names)}
    if len(kinds) == 1:
        return []
    which = "; ".join(f"{name} on {name_ranks(ranks)}" for name, ranks in kinds.items())
    return [f"note: unequal devices, of which the slowest sets the pace and each rounds in its own way: {which}"]


def _statistics(config: Config, world: World, run: Run) -> list[str]:
    """What batch norm takes its statistics over, where that is not to be taken for granted."""
    group = config.model.group
    if group and batch_norms(run.model):
        return [f"batch norm takes its statistics over groups of {group} images, on any number of processes"]
    if config.exact or world.size == 1 or config.statistics(world.size) == "global":
        return []
    if not local_batch_norms(run.model):
        return []
    return [
        "note: batch norm takes its statistics over each process's own share "
        f"({-(-config.batch_size // world.size // config.accumulate)} images), so results depend on --nproc"
    ]
