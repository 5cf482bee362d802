"""A run from outside: its folder, its checks before anything starts, and what each process does."""

import dataclasses
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config import Config
from lockstep.config.evaluation import Evaluation as Evaluation  # also for who uses this file
from lockstep.config.fields import require
from lockstep.errors import UserError, refusal, unknown
from lockstep.processes.lock import LOCK, hold
from lockstep.processes.world import World

if TYPE_CHECKING:
    from torch import nn

    from lockstep.data.arrays import ImageSet
    from lockstep.data.loaders import EvalLoader


def check(config: Config) -> None:
    """What can be known to be wrong before any process starts. Raises UserError."""
    from lockstep import models
    from lockstep.config.objects import load_object
    from lockstep.data.sources import DATASETS
    from lockstep.parallel.data_parallel import require_gpus
    from lockstep.processes.devices import devices
    from lockstep.processes.proc import require_threads
    from lockstep.training import timm_parts
    from lockstep.training.precision import configure
    from lockstep.watch import mirrors

    dataset, available, optim = config.data.dataset, devices(config.execution), config.optim
    drops = optim.milestones if optim.schedule == "multistep" else ()
    require(
        all(before < after for before, after in itertools.pairwise((0.0, *drops))),
        f"--milestones {','.join(f'{epoch:g}' for epoch in drops)} do not rise from above 0",
        "Give epochs in their order, as 100,150.",
    )
    require(
        not drops or drops[0] < config.epochs,
        f"--schedule multistep never drops: its first milestone is {next(iter(drops), 0):g}, and the run has "
        f"{config.epochs} epoch(s)",
        "Give --milestones within the run, or use --schedule constant.",
    )
    require(
        bool(config.model.init) or not config.model.adapt_init,
        "--adapt-init without --init adapts nothing",
        "Name a file by --init, or leave it out.",
    )
    if dataset not in DATASETS and ":" not in dataset:
        raise unknown("dataset", dataset, DATASETS, "Your own is package.module:factory.")
    models.check(config.model.model)
    timm_parts.check(config.optim)
    if ":" in config.optim.optimizer and not config.optim.optimizer.startswith(timm_parts.PREFIX):
        load_object(config.optim.optimizer, "optimizer")
    if config.data.augment:
        from lockstep.data.transforms import transforms  # imports torchvision, 1.5 s

        transforms(config.data.augment, config.seed, (3, 224, 224), (0.5, 0.5, 0.5))
    mirrors.check(config.execution.log)
    require_threads(config.execution.threads)
    if config.execution.strategy == "dp":
        require_gpus(available)
    if available[0].type == "cpu":  # asking a GPU would start its driver here, in the launcher, beside the workers
        configure(config.precision, available[0])


def claim_folder(config: Config) -> Path:
    """Make the run folder, or take over one that holds a run to go on with.

    Raises:
        UserError: where it holds a run already and --resume never forbids going on, or can't be written.
    """
    execution = config.execution
    folder = Path(execution.out or f"runs/{config.recipe.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        if not execution.out and folder.exists():  # two runs within a second
            folder = folder.with_name(f"{folder.name}-{os.getpid()}")
        if (folder / "journal.jsonl").exists() and config.recovery.resume == "never":
            raise UserError(
                f"{folder} holds a run already",
                "Name another folder with --out, remove that one, or leave --resume out to go on with it.",
            )
        (folder / "weights").mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, RecursionError) as error:  # of a zero byte in its name, and of a thousand folders
        raise UserError(
            f"the run folder {folder} can't be written: {refusal(error)}", "Name another folder with --out."
        ) from error
    return folder


def newest_step(folder: str) -> int:
    """The step of a run's newest checkpoint, -1 where there is none."""
    from lockstep.checkpoint.store import steps

    return max(steps(Path(folder) / "checkpoints"), default=-1)


@contextmanager
def discarded_if_unused(folder: Path) -> Iterator[None]:
    """At the end take back what `claim_folder` made, where no run came of it: there is no journal."""
    try:
        yield
    finally:
        if not (folder / "journal.jsonl").exists():
            (folder / "config.json").unlink(missing_ok=True)
            (folder / LOCK).unlink(missing_ok=True)  # held until the folder is gone
            parents = [folder.parent] if folder.parent == Path("runs") else []
            for made in (folder / "weights", folder, *parents):
                with suppress(OSError):  # it holds something of somebody else's
                    made.rmdir()


def read_config(folder: str) -> Config:
    """The config of a run folder. Raises UserError where there is none or it can't be read."""
    from lockstep.watch.journal import require_plain

    path = Path(folder) / "config.json"
    require_plain(path)
    try:
        return Config.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder} is no run folder: {path} can't be read ({error})", "Name one that `lockstep train` made."
        ) from error


def run(world: World, config: Config, claimed: str, began: float | None = None) -> int:
    """Train on this process, as one of the world's; returns the number of the signal that stopped it, or 0.

    `claimed`: the run folder, where the starting process made it. `began`: see `loop.train`.
    """
    from lockstep.training.control import OUT_OF_TIME
    from lockstep.training.loop import train
    from lockstep.watch.progress import duration

    config.require_batch_for(world.size)
    with ExitStack() as claim:
        if world.rank == 0 and not claimed:
            claimed = str(claim_folder(config))
            claim.enter_context(hold(Path(claimed)))
            claim.enter_context(discarded_if_unused(Path(claimed)))
        folder = Path(world.gather(claimed)[0])
        outcome = train(config, world, folder, began)
    state = outcome.state
    if state.metrics is not None:
        world.print(f"test accuracy {state.metrics.top1:.2%} (top-1 on {state.metrics.count:,} images)")
    if outcome.epochs > 0:
        each = f", {outcome.seconds / outcome.epochs:.3g} s an epoch" if outcome.epochs >= 1 else ""
        world.print(f"trained in    {duration(outcome.seconds)}{each}")
    world.print(f"run folder    {folder}")
    if outcome.stop == OUT_OF_TIME:
        world.print(
            f"--max-time {config.recovery.max_time} is over after step {state.steps}; the same command with "
            f"`--out {folder}` goes on from here"
        )
        return 0
    if outcome.stop:
        how = f"`--out {folder}` goes on from here" if config.recovery.checkpoint_every != "0" else "nothing was kept"
        world.print(f"stopped by {signal.Signals(outcome.stop).name} after step {state.steps}; {how}")
    return signal.Signals(outcome.stop) if outcome.stop else 0


def require_trusted(config: Config, folder: str, trust_code: bool, *, trains: bool = False) -> None:
    """Raise UserError where reading a run would import code that its config.json names, and nobody allowed that.

    `trains`: what only training uses is imported as well.
    """
    from lockstep.data.named import is_code
    from lockstep.data.transform_names import is_own
    from lockstep.training.timm_parts import PREFIX

    model, dataset, optimizer = config.model.model, config.data.dataset, config.optim.optimizer
    named = {f"model {model}": ":" in model, f"dataset {dataset}": is_code(dataset)}
    if trains:
        named[f"optimizer {optimizer}"] = ":" in optimizer and not optimizer.startswith(PREFIX)
        named |= {f"augment {spec}": is_own(spec) for spec in config.data.augment}
    if code := [name for name, is_so in named.items() if is_so]:
        require(
            trust_code,
            f"{folder}/config.json names code that this would run: {', '.join(code)}",
            "Read it; if you trust it, give --trust-code.",
        )


def to_evaluate(world: World, config: Config, folder: str, which: str) -> tuple["nn.Module", "ImageSet", "EvalLoader"]:
    """A run's weights in its model, its training set, and the loader of its evaluation set; on this process.

    Raises:
        UserError: for missing or damaged weights or data, and where the data has other classes.
    """
    from lockstep.checkpoint import weights
    from lockstep.training.assemble import build_model, eval_loader, load_data
    from lockstep.training.precision import configure

    # the run's own weights take the place of what it began with
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, init=""))
    configure(config.precision, world.device)
    train_set, val_set = load_data(config, world)
    model = build_model(config, train_set).to(world.device)
    path = Path(folder) / "weights" / f"{which}.safetensors"
    weights.load(model, path)
    known = weights.note_of(path).get("classes")
    if known is not None and known != json.dumps(list(val_set.classes)):
        raise UserError(
            f"{path} was trained on other classes than {val_set.name} has, or in another order",
            "Name the data that it was trained on with --data-dir.",
        )
    return model, train_set, eval_loader(config, val_set, world)


def evaluate_run(world: World, config: Config, folder: str, chosen: Evaluation) -> None:
    """Evaluate saved weights on this process, as one of the world's."""
    from lockstep.training.by_class import ClassCounts, write
    from lockstep.training.evaluation import evaluate
    from lockstep.watch.progress import ProgressBar

    # chunks of the size that the run used: other shapes would round otherwise
    execution = dataclasses.replace(chosen.execution, eval_batch_size=config.execution.eval_batch_size)
    config = dataclasses.replace(config, execution=execution)
    model, _, loader = to_evaluate(world, config, folder, chosen.weights)
    val_set = loader.images
    counts = ClassCounts(val_set, world.device)
    bar = ProgressBar(0, 1, enabled=world.rank == 0)
    share = world.share(loader.chunks)
    tick = bar.counting("evaluation", len(val_set), share.stop - share.start)
    with closing(bar):
        metrics = evaluate(model, loader, world, config.precision, tick=tick, tta=config.tta, observe=counts.add)
    scores = counts.scores(val_set.classes, world)
    world.print(f"{chosen.weights} weights of {folder}: {metrics}")
    world.print(scores)
    if chosen.report and world.rank == 0:
        write(scores, Path(chosen.report))
