"""From a config to the parts of a run: data, model, optimizer, step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep import models
from lockstep.checkpoint.foreign import load_foreign
from lockstep.config import Config
from lockstep.data import sources
from lockstep.data.arrays import ImageSet
from lockstep.data.augment import Augment
from lockstep.data.balance import Classes, RepeatedOrder, labels_of
from lockstep.data.label_sets import table_on
from lockstep.data.loaders import EvalLoader, TrainLoader
from lockstep.data.mixing import Mixing
from lockstep.data.order import Order
from lockstep.data.readers import reader
from lockstep.errors import UserError
from lockstep.parallel import repeatable
from lockstep.parallel.strategy import spread
from lockstep.processes.world import World
from lockstep.randomness import stream
from lockstep.training import optimizers, precision, pretrained, schedules
from lockstep.training.average import Average
from lockstep.training.class_losses import loss_of
from lockstep.training.freezing import Freezing, freeze
from lockstep.training.step import TrainStep


@dataclass
class Run:
    """The parts of a training run on one rank."""

    model: nn.Module  # the user's module, unwrapped
    train: TrainLoader
    val: EvalLoader
    step: TrainStep
    ema: Average | None
    freezing: Freezing = field(default_factory=Freezing)
    notes: list[str] = field(default_factory=list)  # what a reader of the run's first lines should know of its loss

    def enter(self, epoch: int) -> None:
        """Before the steps of an epoch, counted from 0: what of the model is trained in it."""
        self.step.withheld = self.freezing.enter(self.model, epoch)

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


def load_data(config: Config, world: World, given: Any = None) -> tuple[ImageSet, ImageSet]:
    """The training and the evaluation set; `given`: the two themselves, as a user has made them."""
    world.status(f"starting: loading {config.data.dataset}")
    folder = sources.resolve_data_dir(config.execution.data_dir)
    sets = sources.load(config.data, folder, config.seed, world, given)
    where, skip = config.execution.cache, config.data.skip_broken
    if not (where or skip):
        return sets
    from lockstep.data.keeping import keep  # imports torchvision, 1.5 s

    return keep(sets, where, skip, world)


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
    mixing = _mixing(config, images, world) if config.samples.mixes else None
    return TrainLoader(images, order, augment, world, read, config.accumulate, config.exact, group, level, mixing)


def _order(config: Config, images: ImageSet) -> Order:
    given = len(images), config.batch_size, config.seed, config.data.fraction, config.data.drop_last
    plain, samples = Order(*given), config.samples
    if samples.balance == "none" and samples.aug_repeats == 1:
        return plain
    classes = None
    if samples.balance != "none":
        labels = labels_of(images, f"--balance {samples.balance}")
        classes = Classes(
            labels, plain.members(), len(images.classes), config.seed, samples.balance, samples.aug_repeats
        )
    return RepeatedOrder(*given, samples.aug_repeats, classes)


def _mixing(config: Config, images: ImageSet, world: World) -> Mixing:
    mix, classes, sets = config.samples, len(images.classes), table_on(images, world.device)
    epochs = config.epochs - mix.mix_off_epochs if mix.mix_off_epochs else None
    return Mixing(config.seed, classes, mix.mixup, mix.cutmix, mix.mix_prob, mix.mix_switch, epochs, sets)


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


def build_model(
    config: Config, images: ImageSet, say: Callable[[str], object] = lambda _: None, world: World | None = None
) -> nn.Module:
    """The model on the host, its initial weights a function of the seed alone. `say`: how others' are adapted.

    `world`: whose ranks all call it, of which one a host downloads published weights.
    """
    torch.manual_seed(stream(config.seed, "weights"))
    name, channels, size = config.model.model, images.shape[0], config.data.image_size or images.shape[1]
    model = models.build(name, in_channels=channels, num_classes=len(images.classes), image_size=size)
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
        repeatable.configure(world)
    train_set, val_set = load_data(config, world)
    if len(train_set.classes) < 2 and table_on(train_set, world.device) is None:
        only = ", ".join(train_set.classes) or "none"
        raise UserError(
            f"{config.data.dataset} has a single class, {only}: every network is right about it",
            "Give the images of at least two classes, each in a folder of its own.",
        )
    train, val = train_loader(config, train_set, world), eval_loader(config, val_set, world)
    world.status(f"starting: building {config.model.model}")
    model, optim = build_model(config, train_set, world.print, world).to(dtype=dtype), config.optim
    freezing = freeze(model, config.model)
    ema = Average(model, optim.ema, optim.ema_warmup) if optim.ema else None
    module, sync = spread(model, world, config, seen(config, train_set), twins=[ema.module] if ema else ())
    if config.model.compile:
        model.compile(mode=config.model.compile_mode)
    optimizer = optimizers.build(model, optim, config.lr)
    loss, notes = loss_of(optim, train)
    step = TrainStep(
        module,
        loss,
        optimizer,
        precision=config.precision,
        clip_norm=optim.clip_norm,
        schedule=_schedule(config, train),
        seed=config.seed,
        sync=sync,
        find_unused_parameters=config.model.find_unused_parameters,
        skip_nonfinite=config.on_nonfinite == "skip",
    )
    notes += schedules.never_reached(optim, config.epochs)
    run = Run(model, train, val, step, ema, freezing, notes)
    run.enter(0)
    return run


def _schedule(config: Config, train: TrainLoader) -> Callable[[int], float]:
    order = train.order
    return lambda samples: schedules.factor(config.optim, samples, order.samples_per_epoch, config.epochs)
