"""A run from outside: its folder, its checks before anything starts, what each process does, and whose code may run."""

import dataclasses
import hashlib
import importlib.util
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
from lockstep.config.execution import Evaluation as Evaluation  # also for who uses this file
from lockstep.config.fields import flattened, printed, require
from lockstep.distributed.files import LOCK, hold
from lockstep.distributed.resize import Resize
from lockstep.distributed.world import World
from lockstep.errors import UserError, is_url, refusal, unknown

if TYPE_CHECKING:
    from torch import nn

    from lockstep.checkpoint.remote import Mirror
    from lockstep.data.image_sets import ImageSet
    from lockstep.data.loaders import EvalLoader


def check(config: Config) -> None:
    """What can be known to be wrong before any process starts. Raises UserError."""
    from lockstep import models
    from lockstep.config.objects import load_object
    from lockstep.data.sources import DATASETS
    from lockstep.distributed.devices import devices
    from lockstep.distributed.proc import threads_each
    from lockstep.monitoring import loggers
    from lockstep.training import optimizers
    from lockstep.training.precision import configure

    dataset, available, optim = config.data.dataset, devices(config.execution), config.optim
    drops = optim.milestones if optim.schedule == "multistep" else ()
    require(
        all(before < after for before, after in itertools.pairwise((0.0, *drops))),
        f"--milestones {','.join(f'{epoch:g}' for epoch in drops)} do not rise from above 0",
        "Give epochs in their order, as 100,150.",
    )
    require(
        bool(config.model.init) or not config.model.adapt_init,
        "--adapt-init without --init adapts nothing",
        "Name a file by --init, or leave it out.",
    )
    if dataset not in DATASETS and ":" not in dataset:
        raise unknown("dataset", dataset, DATASETS, "Your own is package.module:factory.")
    models.check(config.model.model)
    optimizers.require_timm(config.optim)
    if ":" in config.optim.optimizer and not config.optim.optimizer.startswith(optimizers.PREFIX):
        load_object(config.optim.optimizer, "optimizer")
    if config.data.augment:
        from lockstep.data.transforms import Transforms  # imports torchvision, 1.5 s

        Transforms(config.data.augment, config.seed, (3, 224, 224), (0.5, 0.5, 0.5))
    loggers.check(config.execution.log)
    threads_each(config.execution.threads)
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
        if is_url(execution.out):
            from lockstep.checkpoint.remote import make_local

            folder = make_local(execution.out)
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
    from lockstep.checkpoint.store import list_checkpoints

    return max(list_checkpoints(Path(folder) / "checkpoints"), default=-1)


@contextmanager
def discarded_if_unused(folder: Path) -> Iterator[None]:
    """At the end take back what `claim_folder` made, where no run came of it: there is no journal."""
    try:
        yield
    finally:
        if not (folder / "journal.jsonl").exists():
            for name in ("config.json", "remote.json", LOCK):  # held until the folder is gone
                (folder / name).unlink(missing_ok=True)
            parents = [folder.parent] if folder.parent == Path("runs") else []
            for made in (folder / "weights", folder, *parents):
                with suppress(OSError):  # it holds something of somebody else's
                    made.rmdir()


def read_config(folder: str, trust_code: bool) -> Config:
    """The config of a run folder.

    Raises:
        UserError: where there is none, it can't be read, or it names code and nobody allowed that.
    """
    from lockstep.monitoring.journal import require_plain

    path = Path(folder) / "config.json"
    require_plain(path)
    try:
        config = Config.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder} is no run folder: {path} can't be read ({error})", "Name one that `lockstep train` made."
        ) from error
    require_trusted(config, str(path), trust_code)
    return config


# what belongs to one machine, or to its place among them; everything else is the run's
OF_A_MACHINE = frozenset(
    {"node_rank", "nproc", "gpus", "threads", "workers", "data_dir", "cache", "master_addr", "verbose"}
)


def require_same_config(world: World, config: Config) -> None:
    """Compare the config of all ranks, and the files of the user's own code that it names; all call it together.

    Raises:
        UserError: on all of them, naming what differs, where.
    """
    if world.size == 1:
        return
    values = {path.rpartition(".")[2]: printed(value) for path, value in flattened(config.to_dict()).items()}
    mine = {f"--{name.replace('_', '-')}": value for name, value in values.items() if name not in OF_A_MACHINE}
    world.require_same(mine | sources_named(config))


def run(world: World, config: Config, claimed: str, began: float | None = None) -> int | Resize:
    """Train on this process, as one of the world's; returns the number of the signal that stopped it, or 0.

    Or, for `launch`, the other processes that shall go on.

    `claimed`: the run folder, where the starting process made it. `began`: see `loop.train`.
    """
    from lockstep.monitoring.progress import duration
    from lockstep.training.control import OUT_OF_TIME
    from lockstep.training.loop import train

    require_same_config(world, config)
    config.require_batch_for(world.size)
    with ExitStack() as claim:
        if world.rank == 0 and not claimed:
            claimed = str(claim_folder(config))
            claim.enter_context(hold(Path(claimed)))
            claim.enter_context(discarded_if_unused(Path(claimed)))
        folder = Path(world.gather(claimed)[0])
        mirror = _mirror(world, config, folder, claim) if is_url(config.execution.out) else None
        outcome = train(config, world, folder, began, mirror, resizable=True, sources=sources_named(config))
    state = outcome.state
    if outcome.resize is not None:
        return outcome.resize
    if state.metrics is not None:
        world.print(f"test accuracy {state.metrics.top1:.2%} (top-1 on {state.metrics.count:,} images)")
    if outcome.epochs > 0:
        each = f", {outcome.seconds / outcome.epochs:.3g} s an epoch" if outcome.epochs >= 1 else ""
        world.print(f"trained in    {duration(outcome.seconds)}{each}")
    elif not outcome.stop:
        ended = f"ended by --patience at step {state.steps}; `--override patience --patience N` goes on"
        world.print(f"all {state.epochs} epochs are done already" if state.epochs == config.epochs else ended)
    world.print(f"run folder    {folder}")
    shown = config.execution.out if is_url(config.execution.out) else folder
    if shown != folder:
        world.print(f"uploaded to   {shown}")
    if outcome.stop == OUT_OF_TIME:
        world.print(
            f"--max-time {config.recovery.max_time} is over after step {state.steps}; the same command with "
            f"`--out {shown}` goes on from here"
        )
        return 0
    if outcome.stop:
        how = f"`--out {shown}` goes on from here" if config.recovery.checkpoint_every != "0" else "nothing was kept"
        world.print(f"stopped by {signal.Signals(outcome.stop).name} after step {state.steps}; {how}")
    return signal.Signals(outcome.stop) if outcome.stop else 0


def _mirror(world: World, config: Config, folder: Path, stack: ExitStack) -> "Mirror | None":
    """On rank 0: claim the store that --out names, fetch what it has newer, and mirror it until the stack ends."""
    from lockstep.checkpoint.remote import Mirror
    from lockstep.training.resume import digests

    made, execution = list[Mirror](), config.execution

    def claim() -> None:
        world.status(f"starting: looking at {execution.out}")
        mirror = Mirror(execution.out, folder, digests, config.recovery.keep, execution.collective_timeout)
        made.append(stack.enter_context(mirror))
        for line in mirror.fetched:
            world.print(line)
        claim_folder(config)  # a run that was fetched is one too

    world.by_first(claim)
    return made[0] if made else None


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
    known = weights.read_metadata(path).get("classes")
    if known is not None and known != json.dumps(list(val_set.classes)):
        raise UserError(
            f"{path} was trained on other classes than {val_set.name} has, or in another order",
            "Name the data that it was trained on with --data-dir.",
        )
    return model, train_set, eval_loader(config, val_set, world)


def evaluate_run(world: World, config: Config, folder: str, chosen: Evaluation) -> None:
    """Evaluate saved weights on this process, as one of the world's."""
    from lockstep.monitoring.progress import ProgressBar
    from lockstep.training.evaluation import ClassCounts, evaluate, write_scores

    # chunks of the size that the run used: other shapes would round otherwise
    execution = dataclasses.replace(chosen.execution, eval_batch_size=config.execution.eval_batch_size)
    config = dataclasses.replace(config, execution=execution)
    model, _, loader = to_evaluate(world, config, folder, chosen.weights)
    val_set = loader.images
    counts = ClassCounts(val_set, world.device)
    bar = ProgressBar(0, 1, enabled=world.rank == 0)
    share = world.shard(loader.chunks)
    tick = bar.counting("evaluation", len(val_set), share.stop - share.start)
    with closing(bar):
        metrics = evaluate(model, loader, world, config.precision, tick=tick, tta=config.tta, observe=counts.add)
    scores = counts.scores(val_set.classes, world)
    world.print(f"{chosen.weights} weights of {folder}: {metrics.described(len(val_set.classes))}")
    world.print(scores)
    if chosen.report and world.rank == 0:
        print(write_scores(scores, Path(chosen.report)))


def code_named(config: Config) -> list[str]:
    """Every entry of a config that names code to import, as `model my_package.nets:make`."""
    from lockstep.config.data import is_code

    optimizer = config.optim.optimizer
    named = {
        f"recipe {config.recipe}": ":" in config.recipe,
        f"model {config.model.model}": ":" in config.model.model,
        f"dataset {config.data.dataset}": is_code(config.data.dataset),
        f"optimizer {optimizer}": ":" in optimizer and not optimizer.startswith("timm:"),
    }
    if any(":" in spec for spec in config.data.augment):
        from lockstep.data.transforms import is_own  # imports torchvision, 1.5 s

        named |= {f"augment {spec}": is_own(spec) for spec in config.data.augment}
    return [name for name, is_so in named.items() if is_so]


def require_trusted(config: Config, source: str, trust_code: bool) -> None:
    """Raise UserError where a config that was read from `source` names code, and nobody allowed that.

    All of it counts, also what the command at hand would not run: which parts that are may change.
    """
    if not trust_code and (code := code_named(config)):
        raise UserError(
            f"{source} names code that this would run: {', '.join(code)}",
            "Read it; if you trust it, give --trust-code.",
        )


def sources_named(config: Config) -> dict[str, str]:
    """A digest of each file of the user's own code that a config names; they have been imported."""
    found = {}
    for name in code_named(config):
        module = name.partition(" ")[2].partition(":")[0]
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            found[f"the source of {module}"] = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12]
    return found
