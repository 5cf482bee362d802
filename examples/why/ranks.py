"""Training on N ranks, computed in one process: who gets which samples, and what becomes of their gradients.

DDP averages the ranks' gradients. The average of gradients is the gradient of the average of the ranks' losses, so one
forward pass over all shares, weighted, is the same step as N processes; tests/docs/why holds it to DDP on two. That
makes eight ranks as quick as one, and each cause a change of one field.
"""

import math
from dataclasses import dataclass
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor

TRAIN = 900  # of the 1,797 digits, the others are for testing


@dataclass(frozen=True)
class Setup:
    """A training. As it is: right, with what belongs together taken over the global batch."""

    ranks: int = 8
    batch: int = 64  # global
    epochs: int = 10
    lr: float = 0.05
    warmup: int = 0  # epochs in which the rate rises from 0
    set_epoch: bool = True  # a new order in each epoch
    pad: bool = False  # repeat samples, so that each rank has as many
    drop_last: bool = False  # leave out the last batch of an epoch, which is smaller
    rank_means: bool = False  # weigh every rank alike, whatever its share
    class_weights: bool = False  # ten classes, ten weights
    norm: str = "none"  # batch norm over: none, global, local (a rank's share)
    dropout: str = "none"  # masks: none, own, equal (on all ranks)
    shift: str = "none"  # random shifts by a pixel: none, own, equal (on all ranks), frozen (the same in each epoch)
    pad_first: bool = True  # the shifted picture's edge is black; False: what is 0 after normalising, a grey
    schedule_steps: int = 1  # how often the scheduler steps in a step
    summed: str = "together"  # gradients: together, by rank (each its own pass, as N processes round)
    init_seed: int = 0  # added to the seed, for weights
    order_seed: int = 0  # added to the seed, for all else


@dataclass(frozen=True)
class Trained:
    """What a training leaves."""

    scores: Tensor  # float [test samples, 10]
    labels: Tensor
    steps: int
    weights: Tensor  # all parameters in one row

    @property
    def right(self) -> Tensor:
        """1.0 or 0.0 for each test sample."""
        return (self.scores.argmax(1) == self.labels).double()

    @property
    def top1(self) -> float:
        """In per cent."""
        return 100 * float(self.right.mean())

    @property
    def loss(self) -> float:
        return float(F.cross_entropy(self.scores, self.labels))


def digits() -> tuple[Tensor, Tensor]:
    """Images float [1797, 8, 8], 0 to 1, and labels int64, in an order of their own."""
    folder = files("lockstep.data") / "digits"
    data = bytearray(b"".join((folder / name).read_bytes() for name in ("train.bin", "test.bin")))
    records = torch.frombuffer(data, dtype=torch.uint8).view(-1, 65)
    records = records[torch.randperm(len(records), generator=torch.Generator().manual_seed(1))]
    return records[:, 1:].view(-1, 8, 8).to(torch.get_default_dtype()) / 255, records[:, 0].long()


IMAGES, LABELS = digits()
MEAN, STD = 0.3058, 0.3761


def order(setup: Setup, seed: int, epoch: int) -> list[list[Tensor]]:
    """An epoch: for each step the ranks' sample ids."""
    ids = torch.randperm(TRAIN, generator=_generator(seed, "order", epoch if setup.set_epoch else 0))
    if setup.pad:
        ids = torch.cat([ids, ids[: -TRAIN % setup.ranks]])
    batches = [batch for batch in ids.split(setup.batch) if len(batch) == setup.batch or not setup.drop_last]
    return [list(batch.tensor_split(setup.ranks)) for batch in batches]


def train(setup: Setup, seed: int) -> Trained:
    """Train a network of one hidden layer by SGD with momentum and a cosine, and let it judge the test samples."""
    params = _weights(seed + setup.init_seed)
    optimizer = torch.optim.SGD(params, lr=setup.lr, momentum=0.9)
    running = [torch.zeros(64), torch.ones(64)]
    total, step, seed = len(order(setup, seed, 0)) * setup.epochs, 0, seed + setup.order_seed
    for epoch in range(setup.epochs):
        for shares in order(setup, seed, epoch):
            passed = min(step * setup.schedule_steps, total)
            rise = min(1.0, (step + 1) * setup.epochs / (total * setup.warmup)) if setup.warmup else 1.0
            optimizer.param_groups[0]["lr"] = setup.lr * rise * 0.5 * (1 + math.cos(math.pi * passed / total))
            optimizer.zero_grad()
            losses = _losses(params, setup, shares, running, (seed, epoch, step))
            factors = _factors(setup, shares)
            if setup.summed == "together":
                (losses * factors).sum().backward()
            else:
                for part in (losses * factors).split([len(share) for share in shares]):
                    part.sum().backward(retain_graph=True)
            optimizer.step()
            step += 1
    with torch.no_grad():
        x = _normalised(IMAGES[TRAIN:]).flatten(1)
        h = F.linear(x, params[0], params[1])
        if setup.norm != "none":
            h = F.batch_norm(h, running[0], running[1], params[4], params[5], training=False)
        scores = F.linear(h.relu(), params[2], params[3])
    return Trained(scores, LABELS[TRAIN:], step, torch.cat([p.detach().flatten() for p in params]))


def _factors(setup: Setup, shares: list[Tensor]) -> Tensor:
    """What each sample's loss is multiplied by: its weight in the mean over the batch."""
    weights = [_class_weights(setup)[LABELS[share]] for share in shares]
    if setup.rank_means:  # each rank divides by its own weights, and DDP by the number of ranks
        return torch.cat([w / w.sum() / len(shares) for w in weights if len(w)])
    return torch.cat(weights) / torch.cat(weights).sum()


def _class_weights(setup: Setup) -> Tensor:
    return torch.linspace(0.2, 1.8, 10) if setup.class_weights else torch.ones(10)


def _losses(
    params: list[Tensor], setup: Setup, shares: list[Tensor], running: list[Tensor], when: tuple[int, int, int]
) -> Tensor:
    """Each sample's loss, [b], in the order of the shares. `when`: seed, epoch, and step since the start."""
    seed, _, step = when
    ids = torch.cat(shares)
    x = _shifted(setup, IMAGES[ids], ids, shares, when).flatten(1)
    h = F.linear(x, params[0], params[1])
    if setup.norm == "global":
        h = F.batch_norm(h, running[0], running[1], params[4], params[5], training=True, momentum=0.1)
    if setup.norm == "local":  # rank 0's statistics are those that are kept
        parts = h.split([len(share) for share in shares])
        kept: list[tuple[Tensor | None, Tensor | None]] = [(running[0], running[1])]
        kept += [(None, None)] * (len(parts) - 1)
        h = torch.cat(
            [
                F.batch_norm(part, mean, var, params[4], params[5], training=True, momentum=0.1)
                for part, (mean, var) in zip(parts, kept, strict=True)
            ]
        )
    h = h.relu()
    if setup.dropout != "none":
        mask = torch.rand(h.shape, generator=_generator(seed, "dropout", step)) < 0.5
        if setup.dropout == "equal":
            mask = torch.cat([mask[: len(share)] for share in shares])
        h = h * mask * 2
    return F.cross_entropy(F.linear(h, params[2], params[3]), LABELS[ids], reduction="none")


def _shifted(setup: Setup, images: Tensor, ids: Tensor, shares: list[Tensor], when: tuple[int, int, int]) -> Tensor:
    """Normalised pictures, each moved by up to a pixel."""
    if setup.shift == "none":
        return _normalised(images)
    seed, epoch, step = when
    if setup.shift == "equal":  # each rank draws for its share, from the same state
        drawn = torch.randint(0, 3, (len(shares[0]), 2), generator=_generator(seed, "shift", step))
        by = torch.cat([drawn[: len(share)] for share in shares])
    else:
        stream = _generator(seed, "shift", 0 if setup.shift == "frozen" else epoch)
        by = torch.randint(0, 3, (TRAIN, 2), generator=stream)[ids]
    wide = _normalised(F.pad(images, (1, 1, 1, 1))) if setup.pad_first else F.pad(_normalised(images), (1, 1, 1, 1))
    rows = (by[:, :1] + torch.arange(8))[:, :, None]
    columns = (by[:, 1:] + torch.arange(8))[:, None, :]
    return wide[torch.arange(len(ids))[:, None, None], rows, columns]


def _normalised(images: Tensor) -> Tensor:
    return (images - MEAN) / STD


def _generator(seed: int, purpose: str, number: int) -> torch.Generator:
    key = sum(ord(letter) * 31**place for place, letter in enumerate(purpose))
    return torch.Generator().manual_seed((seed * 1_000_003 + key) * 1_009 + number)


def _weights(seed: int) -> list[Tensor]:
    """Two layers' weights and biases, and batch norm's."""
    draw = _generator(seed, "weights", 0)
    first = torch.randn(64, 64, generator=draw) / 8
    second = torch.randn(10, 64, generator=draw) / 8
    start = [first, torch.zeros(64), second, torch.zeros(10), torch.ones(64), torch.zeros(64)]
    return [tensor.requires_grad_() for tensor in start]
