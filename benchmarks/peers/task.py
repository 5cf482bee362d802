"""What all sides train: the network, its initial weights, the optimizer, and the samples in their order."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import transforms

from lockstep import Order, models
from lockstep.config import DataConfig, OptimConfig
from lockstep.data import sources
from lockstep.data.image_sets import ArraySet
from lockstep.distributed.world import World, shard_of

RANK = int(os.environ.get("RANK", "0"))
STEPS_OF_VECTORS = 5000  # batches of the linear task; also the steps of a timed segment there
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What to train, and with how much of the machine."""

    net: str  # linear, mnist or cifar10
    batch: int  # over all ranks
    data: str = "tensors"  # tensors in memory, or the side's loader over per-sample transforms
    precision: str = "fp32"  # or bf16: autocast; or fp64: the comparison of weights to the last digits
    ranks: int = 1
    threads: int = 1  # of each rank
    workers: int = 0  # loader processes over all ranks
    data_dir: str = ""  # "made": random images in the place of the real ones
    plain: bool = False  # no dropout, no augmentation: for the comparison of weights

    @property
    def mine(self) -> int:
        """Samples of a batch on this rank."""
        return len(range(self.batch)[shard_of(self.batch, RANK, self.ranks)])


@dataclass
class Side:
    """A built side. `run(steps)` trains on and returns the seconds that it took."""

    model: nn.Module
    run: Callable[[int], float]
    serve: Callable[[Callable[[], int | None], Callable[[float], None]], None] | None = None  # instead of calling run


class Rows(nn.Linear):
    """Linear(10, 10) for "images" [b, 1, 1, 10]."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.view(-1, 10))


def rows(in_channels: int, num_classes: int, image_size: int) -> nn.Module:  # noqa: ARG001
    return Rows(10, num_classes)


def vectors() -> tuple[Pair, Pair]:
    """The linear task's data set, as Lockstep's users name theirs: --dataset peers.task:vectors."""
    generator = torch.Generator().manual_seed(0)
    n = STEPS_OF_VECTORS * 8
    x, y = torch.randn(n, 1, 1, 10, generator=generator), torch.randint(10, (n,), generator=generator)
    return (x, y), (x[:10], torch.arange(10))


def _made(n: int, *shape: int) -> Pair:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 10
    return torch.randint(256, (n, *shape), generator=generator, dtype=torch.uint8), labels


def made_mnist() -> tuple[Pair, Pair]:
    return _made(2000, 1, 28, 28), _made(100, 1, 28, 28)


def made_cifar10() -> tuple[Pair, Pair]:
    return _made(2000, 3, 32, 32), _made(100, 3, 32, 32)


def dataset(task: Task) -> str:
    """The data set's name in Lockstep's words."""
    if task.net == "linear":
        return "peers.task:vectors"
    return f"peers.task:made_{task.net}" if task.data_dir == "made" else task.net


def data_dir(task: Task) -> str:
    return "" if task.data_dir == "made" else task.data_dir


def model_name(task: Task) -> str:
    return {"linear": "peers.task:rows", "mnist": "mnist_net", "cifar10": "resnet18_cifar"}[task.net]


def optim(task: Task) -> OptimConfig:
    """The optimizer in Lockstep's words; `make_optimizer` has it in torch's."""
    if task.net == "linear":
        return OptimConfig(optimizer="sgd", lr=0.01, momentum=0.0, weight_decay=0.0, schedule="constant")
    if task.net == "mnist":
        return OptimConfig(optimizer="adadelta", lr=1.0, weight_decay=0.0, schedule="constant")
    return OptimConfig(
        optimizer="sgd", lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, schedule="constant"
    )  # fmt: skip


def make_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    settings = optim(task)
    if settings.optimizer == "adadelta":
        return torch.optim.Adadelta(model.parameters(), settings.lr)
    return torch.optim.SGD(
        model.parameters(),
        settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
    )


def make_model(task: Task) -> nn.Module:
    """The network with its initial weights, the same for all; ResNet in channels_last, for all."""
    torch.manual_seed(0)
    images = image_set(task)
    channels, _, side = images.shape
    model = models.build(model_name(task), in_channels=channels, num_classes=10, image_size=side)
    if task.plain:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    if task.precision == "fp64":
        model.double().register_forward_pre_hook(in_float64(images, pixels=task.net != "linear"))
    return model.to(memory_format=torch.channels_last) if task.net == "cifar10" else model


def in_float64(images: ArraySet, *, pixels: bool) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    """Before a model's forward: float32 input as float64, free of what sides lose in normalising it, each in its way.

    Pixels are brought back to the whole numbers that they were, and then normalised.

    Raises:
        RuntimeError: where that is no whole number: a side normalises with other statistics.
    """
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (images.mean, images.std))

    def exactly(_: nn.Module, given: tuple[Tensor]) -> Tensor:
        (x,) = given
        if not pixels:
            return x.double()
        found = x.double().mul_(std).add_(mean).mul_(255)
        whole = found.round()
        if (found - whole).abs().max() > 1e-2:
            raise RuntimeError("the model's input is not an image of 8 bits, normalised with the set's mean and std")
        return whole.div_(255).sub_(mean).div_(std)

    return exactly


def autocast(task: Task) -> Callable[[], AbstractContextManager[object]]:
    return nullcontext if task.precision != "bf16" else lambda: torch.autocast("cpu", torch.bfloat16)


@cache
def image_set(task: Task) -> ArraySet:
    folder = sources.resolve_data_dir(data_dir(task))
    found = sources.load(DataConfig(dataset=dataset(task)), folder, 0, World.single())[0]
    assert isinstance(found, ArraySet)
    return found


@cache
def shares(task: Task) -> list[np.ndarray]:
    """This rank's sample ids of every full step of an epoch: Lockstep's order, for all."""
    order = Order(len(image_set(task)), task.batch, seed=0, drop_last=True)
    return [ids[shard_of(task.batch, RANK, task.ranks)] for ids in order.steps(0)]


def tensor_batches(task: Task) -> Iterator[Pair]:
    """Batches out of tensors in memory, without end: normalised before where nothing is drawn, else batch by batch."""
    found = image_set(task)
    images, labels = found.load_all()
    index = [torch.from_numpy(ids) for ids in shares(task)]
    if task.net == "linear":
        return itertools.cycle([(images[ids], labels[ids]) for ids in index])
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (found.mean, found.std))
    if task.net == "mnist":
        images = images.float().div_(255).sub_(mean).div_(std)
        return ((images[ids], labels[ids]) for ids in itertools.cycle(index))
    draw = (lambda x: x) if task.plain else crop_and_flip
    scale, shift = 1 / (255 * std), -mean / std
    return ((draw(images[ids]).float().mul_(scale).add_(shift), labels[ids]) for ids in itertools.cycle(index))


def crop_and_flip(images: Tensor) -> Tensor:
    """Random crops of the padded images and mirror images, a batch at once, as a hand-written loop has it."""
    b, _, h, w = images.shape
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    rows = torch.randint(9, (b, 1)) + torch.arange(h)
    columns = torch.randint(9, (b, 1)) + torch.arange(w)
    columns = torch.where(torch.rand(b, 1) < 0.5, columns, columns.flip(1))
    cut = padded.permute(0, 2, 3, 1)[torch.arange(b)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2)


class Mnist(torchvision.datasets.MNIST):  # type: ignore[misc]
    """torchvision's MNIST with its own `__getitem__`, over images that are read already."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[..., object]) -> None:
        self.data, self.targets = images[:, 0], labels
        self.transform, self.target_transform = transform, None


class Cifar10(torchvision.datasets.CIFAR10):  # type: ignore[misc]
    """torchvision's CIFAR-10 with its own `__getitem__`, over images that are read already."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[..., object]) -> None:
        self.data, self.targets = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()
        self.transform, self.target_transform = transform, None


def sample_set(task: Task, transform: Callable[..., object] | None = None) -> Dataset[Pair]:
    """One sample at a time, with the tutorials' transforms."""
    found = image_set(task)
    drawn = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    usual = transforms.Compose(
        [
            *(drawn if task.net == "cifar10" and not task.plain else ()),
            transforms.ToTensor(),
            transforms.Normalize(found.mean, found.std),
        ]
    )
    made: Dataset[Pair] = (Mnist if task.net == "mnist" else Cifar10)(*found.load_all(), transform or usual)
    return made


class Endless(Sampler[int]):
    """Given sample ids, over and over, so that a loader need not start anew in the middle of a measurement."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids.tolist()

    def __len__(self) -> int:
        return 1000 * len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(self.ids, 1000))


def loader(task: Task, ids: np.ndarray | None = None, batch: int = 0) -> DataLoader[Pair]:
    """torch's DataLoader over per-sample transforms; `ids`: others than this rank's share."""
    workers = task.workers // task.ranks
    return DataLoader(
        sample_set(task),
        batch_size=batch or task.mine,
        sampler=Endless(np.concatenate(shares(task)) if ids is None else ids),
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )


def looped(step: Callable[[Tensor, Tensor], object], batches: Iterator[Pair]) -> Callable[[int], float]:
    """Take a step with each batch."""

    def run(steps: int) -> float:
        began = time.perf_counter()
        for images, labels in itertools.islice(batches, steps):
            step(images, labels)
        return time.perf_counter() - began

    return run
