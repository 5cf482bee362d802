"""From a config to the parts of a run: data, model, optimizer, step; and the loaders for who writes the loop."""

import builtins
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep import models
from lockstep.checkpoint.carried import hidden_state, packed, unpacked
from lockstep.checkpoint.foreign import load_foreign
from lockstep.config import Config, DataConfig, Execution, ModelConfig, SamplesConfig
from lockstep.config.data import is_code
from lockstep.config.fields import require
from lockstep.data import sources
from lockstep.data.agreement import require_same, unsteady
from lockstep.data.augment import Augment, Mixing
from lockstep.data.cache import keep
from lockstep.data.image_sets import ImageSet, table_on
from lockstep.data.loaders import EvalLoader, Samples, TrainLoader, reader
from lockstep.data.order import Classes, Order, Windows, labels_of
from lockstep.data.shards import ShardSet
from lockstep.distributed import loader_workers, warm
from lockstep.distributed.world import World, pretended_rank
from lockstep.errors import UserError, unknown
from lockstep.parallel import determinism
from lockstep.parallel.batchnorm import SyncBatchNorm, local_batch_norms, without_ranks
from lockstep.parallel.fsdp import is_sharded
from lockstep.parallel.hidden_state import HiddenState, digest
from lockstep.parallel.module_state import eval_mode, preserved_state
from lockstep.parallel.strategy import spread
from lockstep.randomness import stream
from lockstep.rng.generators import seed_everything
from lockstep.training import optimizers, precision, pretrained, schedules
from lockstep.training.evaluation import ranks_all
from lockstep.training.freezing import freeze
from lockstep.training.losses import loss_of
from lockstep.training.moving_average import Average
from lockstep.training.step import TrainStep


@dataclass
class Run:
    """The parts of a training run on one rank."""

    model: nn.Module  # the user's module, unwrapped
    train: TrainLoader
    val: EvalLoader
    step: TrainStep
    ema: Average | None
    notes: list[str] = field(default_factory=list)  # what a reader of the run's first lines should know of its loss
    frozen: list[str] = field(default_factory=list)  # the same of what is not trained
    began: HiddenState = field(init=False)  # what its code keeps beside parameters, as it was made

    def __post_init__(self) -> None:
        self.began = self.hidden()

    def hidden(self) -> HiddenState:
        """What the run's code keeps beside parameters and gradients, as it is now."""
        return hidden_state(self.model, self.step.optimizer, self.step.loss, self.ema)

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are evaluated and kept: the moving average where there is one."""
        return self.ema.module if self.ema is not None else self.model

    def synchronize(self) -> None:
        """Make weights and buffers the same on all ranks, before they are evaluated or kept; all call it together."""
        self.step.sync.synchronize()
        if self.ema is not None:
            for average, buffer in zip(self.ema.module.buffers(), self.model.buffers(), strict=True):
                average.copy_(buffer)  # as every update of the average does


def load_data(
    config: Config,
    world: World,
    given: tuple[Any, Any] | None = None,
    report: Callable[[str], object] = lambda _: None,
    again: bool = True,
) -> tuple[ImageSet, ImageSet]:
    """The training and the evaluation set; all ranks call it together.

    Args:
        given: the two themselves, as a user has made them.
        report: gets a sentence about a set whose samples are not always the same, unless --law is off.
        again: another process may make the set too, as on another number of them. In a user's own loop it would lack
            what the script has set since it began: a default dtype, a variable that a factory reads.
    """
    world.status(f"starting: loading {config.data.dataset}")
    folder, law = sources.resolve_data_dir(config.execution.data_dir), config.execution.law
    sets = sources.load(config.data, folder, config.seed, world, given)
    where, skip = config.execution.cache, config.data.skip_broken
    if where or skip:
        sets = keep(sets, where, skip, world)
    augmented, by = None, ""
    if law != "off" and any(":" in spec for spec in config.data.augment):
        from lockstep.data.transforms import Transforms, is_own  # imports torchvision, 1.5 s

        if own := [spec for spec in config.data.augment if is_own(spec)]:
            by = f" with --augment {' '.join(own)}"
            transforms = Transforms(config.data.augment, config.seed, sets[0].shape, sets[0].mean)
            augmented = Samples(sets[0], transforms).read
    sentences = unsteady(sets, world, augmented, by)
    makes = None
    if again and given is None and is_code(config.data.dataset):
        makes = partial(sources.load, config.data, folder, config.seed, World.single())
    require_same(sets, config.seed, world, makes, [not sentence for sentence in sentences])
    for sentence in sentences:
        _say(law, sentence, report)
    return sets


def _say(law: str, sentence: str, report: Callable[[str], object]) -> None:
    """What the law has to say, if anything."""
    if sentence and law == "strict":
        raise UserError(f"--law strict: {sentence}", "Mend that, or give --law warn.")
    if sentence and law != "off":
        report(sentence)


def train_loader(config: Config, images: ImageSet, world: World) -> TrainLoader:
    """The training loader of a config over a set."""
    data, execution = config.data, config.execution
    if data.crop_fill == "reflect" and data.crop_padding >= min(images.shape[1:]):
        raise UserError(
            f"--crop-fill reflect: images of {images.shape[1]}x{images.shape[2]} have no {data.crop_padding} pixels "
            "beside the edge to reflect",
            "Use a smaller --crop-padding.",
        )
    order = _order(config, images)
    augment = Augment(
        images.mean,
        images.std,
        config.seed,
        crop_padding=data.crop_padding,
        crop_fill=data.crop_fill,
        flip=data.flip,
        alternate_flip=data.alternate_flip,
        cutout=data.cutout,
        image_size=data.train_side,
    )
    transforms = None
    if data.augment:
        from lockstep.data.transforms import tried_transforms  # imports torchvision, 1.5 s

        transforms = tried_transforms(data.augment, config.seed, images)
    read = reader(images, world.device, execution.loader, execution.workers, transforms)
    level = execution.strategy == "fsdp"  # whose passes hold collectives
    group = config.model.group or 1
    mix, mixing = config.samples, None
    if mix.mixes:
        mixing = Mixing(config.seed, len(images.classes), mix.mixup, mix.cutmix, table_on(images, world.device))
    return TrainLoader(images, order, augment, world, read, config.accumulate, config.exact, group, level, mixing)


def _order(config: Config, images: ImageSet) -> Order:
    given = len(images), config.batch_size, config.seed, config.data.fraction, config.data.drop_last
    samples, classes, windows = config.samples, None, None
    if width := config.data.shuffle_window:
        if not isinstance(images, ShardSet):
            raise UserError(f"--shuffle-window {width}: {images.name} is not in shards", "Leave it out.")
        windows = Windows(images.source.shard_sizes, width, config.seed, config.data.fraction)
    if samples.balance != "none":
        labels, members = labels_of(images, f"--balance {samples.balance}"), Order(*given).members()
        classes = Classes(labels, members, len(images.classes), config.seed, samples.balance, samples.aug_repeats)
    return Order(*given, samples.aug_repeats, classes, windows)


def seen(config: Config, images: ImageSet) -> tuple[int, int, int]:
    """[C, H, W] of the images as the model sees them in training."""
    channels, height, width = images.shape
    side = config.data.train_side
    return channels, side or height, side or width


def eval_loader(config: Config, images: ImageSet, world: World) -> EvalLoader:
    """The evaluation loader of a config over a set."""
    execution = config.execution
    augment = Augment(images.mean, images.std, image_size=config.data.image_size)
    read = reader(images, world.device, execution.loader, execution.workers)
    return EvalLoader(images, augment, world, read, execution.eval_batch_size)


def fresh_model(name: str, channels: int, classes: int, size: int, seed: int) -> nn.Module:
    """A model whose initial weights are a function of the seed alone, if its code draws by the usual generators."""
    seed_everything(stream(seed, "weights"))
    return models.build(name, in_channels=channels, num_classes=classes, image_size=size)


def _generators(state: HiddenState, owner: str) -> dict[str, list[float]]:
    """A number for each generator in the state of what a factory made."""
    return {f"{key} of {owner}": [float(int(digest(state.values[key]), 16))] for key in state.generators}


def _made(
    config: Config, shape: tuple[int, int, int], classes: int, dtype: torch.dtype, rank: int, ranks: int, turn: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """What a user's factories make on rank `rank` of so many: of each parameter, buffer and generator, and of what
    comes of an image, two numbers, which threads round otherwise, and those of the optimizer's groups and generators;
    digests of what the model keeps beside them. For a process that does nothing else."""
    torch.set_default_dtype(dtype)  # a script may have set it after the parent of this process was forked
    name, factory, found = config.model.model, config.optim.optimizer, dict[str, list[float]]()
    # forks of one process have its addresses, which another run has not: of what it holds, and of what follows
    there = builtins.id
    builtins.id = lambda value, /: there(value) + (turn << 20)
    with pretended_rank(rank, ranks):
        addresses = [nn.Module() for _ in range(1000)]
        del addresses[60 * turn : 60 * turn + 50]
        model = fresh_model(name, shape[0], classes, config.data.image_size or shape[1], config.seed)
        state = HiddenState({"": model})
        if optimizers.is_factory(factory):
            freeze(model, config.model)
            seed_everything(stream(config.seed, "optimizer"))
            optimizer = optimizers.build(model, config.optim, config.lr)
            found |= _generators(HiddenState({"": optimizer}), factory)
            for g, group in enumerate(optimizer.param_groups):
                rows = {key: [*value] if isinstance(value, tuple) else [value] for key, value in group.items()}
                numbers = {key: row for key, row in rows.items() if all(isinstance(each, int | float) for each in row)}
                found |= {f"{key}{_GROUP}{g} of {factory}": row for key, row in numbers.items()}
    del addresses
    tensors = [*model.named_parameters(), *model.named_buffers()] if not pretrained.asked(config) else []
    kept = {key: digest(value) for key, value in state.values.items()}
    found |= _generators(state, name)
    with suppress(Exception), torch.no_grad(), eval_mode(model), pretended_rank(0, 0):
        outputs = model(torch.linspace(-1, 1, 2 * math.prod(shape)).view(2, *shape))
        tensors += [(_OUTPUT, outputs)] if isinstance(outputs, Tensor) else []
    for key, tensor in tensors:
        values = tensor.detach().flatten().abs().double()
        weighted = values * torch.linspace(0.5, 1.5, len(values))
        found[f"{key} of {name}"] = [float(values.norm()), float(weighted.norm())]
    return found, kept


_OUTPUT, _GROUP = "the output", " of parameter group "


def _apart(some: dict[str, list[float]], others: dict[str, list[float]]) -> list[str]:
    """The names of what is not near."""
    pairs = {name: (some.get(name, []), others.get(name, [])) for name in {**others, **some}}
    near = partial(np.allclose, rtol=1e-4, equal_nan=True)
    return [name for name, (a, b) in pairs.items() if len(a) != len(b) or not near(a, b)]


def _not_shared(names: list[str]) -> list[str]:
    """Those that a rank does not begin with as rank 0 has them; an output follows others."""
    groups = [name for name in names if _GROUP in name]
    return groups or (names if all(name.startswith(_OUTPUT) for name in names) else [])


def made_otherwise(config: Config, images: ImageSet, world: World) -> tuple[str, list[str]]:
    """Why what a user's factories make is another thing each time, or on several processes; "" where it is neither. And
    the names of what the model keeps that is another one each time.

    All ranks call it together: rank 0 has other processes make it, one as if alone and two as each of two; where they
    differ, once more. The ranks themselves begin with the weights, buffers and generators that rank 0 has.
    """
    said, moving = "", list[str]()
    own = any(map(optimizers.is_factory, (config.model.model, config.optim.optimizer)))
    if world.rank == 0 and own and warm.at_hand():
        make = partial(_made, config, seen(config, images), len(images.classes), torch.get_default_dtype())

        def made(*turns: tuple[int, int, int]) -> list[tuple[dict[str, list[float]], dict[str, str]]]:
            return [*map(loader_workers.result, [loader_workers.begin(partial(make, *each)) for each in turns])]

        with suppress(Exception):  # another process can't make it; what is wrong with it is said where it is used
            (one, kept), (two, of_two), (second, theirs) = made((0, 0, 0), (0, 2, 1), (1, 2, 2))
            names, by, pair = _apart(one, two), "with the number of processes", (kept, of_two)
            if not names:
                names, by, pair = _not_shared(_apart(two, second)), "by each process's rank", (of_two, theirs)
            if names:
                for turn in range(3, 15, 3):  # another order, for what goes by turns; and more than once, for a coin
                    (third, _), (two_again, _), (one_again, later) = made(
                        (1, 2, turn), (0, 2, turn + 1), (0, 0, turn + 2)
                    )
                    new = [key for key in kept if later.get(key) != kept[key]]
                    changing = [*_apart(one, one_again), *_apart(two, two_again), *_not_shared(_apart(second, third))]
                    if changing:
                        break
                place, moving = (changing or names)[0], new if changing else []
                unlike = moving or [key for key in pair[0] if pair[0][key] != pair[1].get(key) and key not in new]
                if place.startswith(_OUTPUT) and unlike:
                    place += f" (by {' or '.join([*dict.fromkeys(key.partition('[')[0] for key in unlike)][:3])})"
                said = (
                    f"weights will differ with every run: {place} is another one each time it is made. Draw by "
                    "torch's, numpy's or Python's own functions, whose generators are seeded"
                    if changing
                    else f"weights will differ with the number of processes: {place} is made {by}. Let it follow the "
                    "global batch, which is the same on any number of them"
                )
    found: tuple[str, list[str]] = world.gather([said, moving])[0]
    return found


def _not_compared(config: Config, world: World) -> list[str]:
    """A note where factories are a user's, and no other process can be asked what it makes of them."""
    own = [name for name in (config.model.model, config.optim.optimizer) if optimizers.is_factory(name)]
    own += [config.data.dataset] if is_code(config.data.dataset) else []
    if not own or world.rank or config.execution.law == "off" or warm.at_hand():
        return []
    return [
        f"note: {', '.join(own)}: what comes of it is not compared with what other processes make, as this one has "
        "threads. `lockstep train` has none, nor has the first launch of a script"
    ]


def _share_state(held: nn.Module | torch.optim.Optimizer, world: World, moving: Sequence[str] = ()) -> None:
    """Make rank 0's states of the generators that it holds everyone's, as its weights are, and what else moves."""
    state = HiddenState({"": held})
    stems = {name.partition("[")[0] for name in moving}  # a list's elements go together: some are alike by chance
    names = sorted(state.generators | {name for name in state.values if name.partition("[")[0] in stems})
    theirs = world.gather({name: packed(state.values[name]) for name in names})[0]
    for name, value in theirs.items():
        if value is not None:
            state.give(name, unpacked(value))


def build_model(
    config: Config, images: ImageSet, say: Callable[[str], object] = lambda _: None, world: World | None = None
) -> nn.Module:
    """The model on the host, its initial weights a function of the seed alone. `say`: how others' are adapted.

    `world`: whose ranks all call it, of which one a host downloads published weights.
    """
    name, channels, size = config.model.model, images.shape[0], config.data.image_size or images.shape[1]
    model = fresh_model(name, channels, len(images.classes), size, config.seed)
    if config.data.train_size:
        models.require_fit(model, name, channels, config.data.train_size)
    if fit_to := getattr(model, "fit_to", None):  # a layer computed from the data, as a whitening one
        first = np.arange(min(5000, len(images)))
        pixels, _ = images.read(first, None)
        fit_to(Augment(images.mean, images.std, image_size=size)(pixels, torch.from_numpy(first), None))
    if pretrained.asked(config):
        weights = pretrained.weights_of(config)
        pretrained.begin(
            model, weights, pretrained.file_of(weights, world or World.single()), (channels, size, size), say
        )
    elif config.model.init:
        for line in load_foreign(model, config.model.init, config.model.adapt_init, images.classes):
            say(f"--init {config.model.init}: {line}")
    return model.to(memory_format=torch.channels_last) if config.model.channels_last else model


def assemble(config: Config, world: World, dtype: torch.dtype | None = None) -> Run:
    """Everything that the loop needs, built in the order in which the parts depend on each other.

    `dtype` is that of the parameters and floating-point buffers, where it is not the model's own.
    """
    precision.configure(config.precision, world.device)
    if config.exact:
        determinism.configure(world)
    said = list[str]()
    train_set, val_set = load_data(config, world, report=said.append)
    if len(train_set.classes) < 2 and table_on(train_set, world.device) is None:
        only = ", ".join(train_set.classes) or "none"
        raise UserError(
            f"{config.data.dataset} has a single class, {only}: every network is right about it",
            "Give the images of at least two classes, each in a folder of its own.",
        )
    require(
        config.selection.keep_best != "map" or ranks_all(val_set),
        f"--keep-best map: {val_set.name} has one label a picture, or too many labels to keep all their probabilities",
        "It is for several labels a picture; name another metric, as macro-f1.",
    )
    train, val = train_loader(config, train_set, world), eval_loader(config, val_set, world)
    world.status(f"starting: building {config.model.model}")
    sentence, moving = "", list[str]()
    if config.execution.law != "off":
        sentence, moving = made_otherwise(config, train_set, world)
        _say(config.execution.law, sentence, said.append)
    model, optim = build_model(config, train_set, world.print, world).to(dtype=dtype), config.optim
    _share_state(model, world, moving)
    frozen = freeze(model, config.model)
    ema = Average(model, optim.ema, optim.ema_warmup) if optim.ema else None
    module, sync = spread(model, world, config, from_host=True, twins=[ema.module] if ema else ())
    if config.model.compile:
        model.compile(mode=config.model.compile_mode)
    seed_everything(stream(config.seed, "optimizer"))
    optimizer = optimizers.build(model, optim, config.lr)
    _share_state(optimizer, world)
    loss, notes = loss_of(optim, train)
    step = TrainStep(
        module,
        loss,
        optimizer,
        precision=config.precision,
        clip_norm=optim.clip_norm,
        schedule=lambda samples: schedules.factor(optim, samples, train.order.samples_per_epoch, config.epochs),
        seed=config.seed,
        sync=sync,
        skip_nonfinite=config.on_nonfinite == "skip",
        law=config.execution.law,
    )
    step.own_loop = False
    if any(each.startswith("weights will differ") for each in said):
        step.check.note_said()
    notes += schedules.never_reached(optim, config.epochs)
    notes += [f"note: {each}. --law off looks no more, --law strict ends the run" for each in said]
    notes += _not_compared(config, world)
    return Run(model, train, val, step, ema, notes, frozen)


_ORDER = (
    "The order is a function of seed and epoch, the same on any number of processes. For classes equally often give "
    'balance="equal", for a part of the set fraction=0.1, for any other choice a torch.utils.data.Subset.'
)
_NOT_TAKEN = {  # DataLoader's arguments, and what is here in their place
    **dict.fromkeys(("sampler", "batch_sampler", "shuffle"), _ORDER),
    "num_workers": "That is workers=2 here, for each process.",
    "collate_fn": "A Dataset gives a picture and its label; put what changes them into its __getitem__.",
    "generator": "Draws are keyed by seed=0, epoch and sample.",
    **dict.fromkeys(
        ("pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn", "timeout", "multiprocessing_context"),
        "Leave it out: workers and copies are looked after.",
    ),
}


def loaders(
    dataset: str | tuple[Any, Any],
    world: World,
    *,
    batch_size: int,
    seed: int = 0,
    accumulate: int = 1,
    exact: int = 0,
    batch_norm: str = "auto",
    data_dir: str = "",
    workers: int = 2,
    cache: str = "",
    **data: Any,
) -> tuple[TrainLoader, EvalLoader]:
    """The training and the evaluation loader of a data set, for a loop of one's own.

    Args:
        dataset: a name that `--dataset` takes, package.module:factory, or (train, val): map-style Datasets as they
            are, with transforms of their own, or pairs of tensors (images, labels). The same on every rank.
        world: as passed to the function that `launch` runs.
        batch_size: global: samples per step over all ranks.
        exact: for exact mode: cut each batch into so many slices.
        batch_norm: as passed to `parallelize`: the batch is cut between its groups alone.
        cache: keep pictures that `decode_size` shrank: in a folder, or "auto".
        data: further fields of DataConfig and SamplesConfig, as crop_padding=4, flip=True, fraction=0.25, mixup=0.2.
    """
    name, given = (dataset, None) if isinstance(dataset, str) else ("ls.loaders", dataset)
    samples = {name: data.pop(name) for name in [*data] if name in SamplesConfig.__dataclass_fields__}
    for argument in data.keys() - DataConfig.__dataclass_fields__.keys():
        if argument in _NOT_TAKEN:
            raise UserError(f"ls.loaders takes no {argument}", _NOT_TAKEN[argument])
        known = [*DataConfig.__dataclass_fields__, *SamplesConfig.__dataclass_fields__]
        raise unknown("argument of ls.loaders", argument, known, "help(lockstep.loaders) has them.")
    config = Config(
        batch_size=batch_size,
        seed=seed,
        accumulate=accumulate,
        exact=exact,
        model=ModelConfig(batch_norm=batch_norm),
        data=DataConfig(dataset=name, **data),
        samples=SamplesConfig(**samples),
        execution=Execution(data_dir=data_dir, workers=workers, cache=cache),
    )
    said: list[str] = []
    train_set, val_set = load_data(config, world, given, said.append, again=False)
    for sentence in said if world.rank == 0 else ():
        warnings.warn(sentence, stacklevel=2)
    return train_loader(config, train_set, world), eval_loader(config, val_set, world)


def refuse_single_values(config: Config, world: World, run: Run) -> None:
    """Raise UserError where some batch of the run would give batch norm one value; rank 0 looks."""
    order = run.train.order
    rest = order.samples_per_epoch % order.batch_size
    counts = ([order.batch_size] if order.samples_per_epoch >= order.batch_size else []) + ([rest] if rest else [])
    for count in counts:
        parts = min(config.exact or config.accumulate, count)
        together = {count // parts, -(-count // parts)}  # samples of a micro-batch, or of a slice
        ranks = 1 if config.exact else world.size
        shares = {n for samples in together for n in (samples // ranks, -(-samples // ranks))}
        layers: list[nn.Module] = list(local_batch_norms(run.model)) if 1 in shares else []
        layers += [m for m in run.model.modules() if isinstance(m, SyncBatchNorm)] if 1 in together else []
        layers = [layer for layer in layers if layer.training]
        if layers and not world.rank and not is_sharded(run.model):
            _refuse(config, run, layers, count)


def _refuse(config: Config, run: Run, layers: list[nn.Module], count: int) -> None:
    seen: dict[nn.Module, int] = {}

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0]
        seen[layer] = x.numel() // x.shape[1] // 2

    images = run.train.images
    pixels, _ = images.read(np.zeros(2, np.int64), None)  # two, as some layer may be in training all the same
    two = Augment(images.mean, images.std, image_size=config.data.train_side)(pixels, torch.zeros(2).long(), None)
    like = next(run.model.parameters())
    with ExitStack() as hooks, preserved_state(run.model), eval_mode(run.model), without_ranks(), torch.no_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(note))
        run.model(two.to(like.device, like.dtype))
    names = [name for name, module in run.model.named_modules() if seen.get(module) == 1]
    if names:
        raise UserError(
            f"batch norm {names[0]} sees one value of each channel, and in a batch of {count} one sample passes by "
            "itself: a single value has no spread",
            "Leave the short last batch out by --drop-last, or choose another --batch-size or fewer slices.",
        )
