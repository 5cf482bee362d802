"""Evaluation on all ranks: every sample once, sums and counts, divided once at the end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import cycle
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data.label_sets import table_on
from lockstep.data.loaders import EvalLoader
from lockstep.parallel.data_parallel import copies, replica_devices
from lockstep.parallel.modules import aligned, average_buffers, eval_mode, preserved
from lockstep.parallel.sharded import is_sharded
from lockstep.parallel.strategy import unwrap
from lockstep.processes.world import World
from lockstep.training.precision import autocast
from lockstep.watch.records import Scores


@dataclass(frozen=True)
class Metrics:
    """What evaluation found: top1 and top5 as fractions, loss as mean cross-entropy in nats, count in samples.

    Of samples with several labels: one of them is the likeliest class, or among the five likeliest; the loss is the
    binary cross-entropy, its mean over the classes. A sample without a label is right where no class reaches 0.5.
    """

    top1: float
    top5: float
    loss: float
    count: int

    def to_dict(self) -> Scores:
        """Plain values, ready for the journal."""
        return cast(Scores, asdict(self))

    def __str__(self) -> str:
        return f"top-1 {self.top1:.2%}  top-5 {self.top5:.2%}  loss {self.loss:.4f}  ({self.count:,} images)"


def evaluate(
    model: nn.Module,
    loader: EvalLoader,
    world: World,
    precision: str = "fp32",
    tick: Callable[[], None] = lambda: None,
    tta: str = "none",
    devices: Sequence[torch.device] = (),
    synchronized: bool = False,
    observe: Callable[[Tensor, Tensor], None] = lambda *_: None,
) -> Metrics:
    """Top-1, top-5 and mean loss of `model` over the whole set, the same on every rank and for every number of ranks.

    The bare module runs: the DDP wrapper's forward holds collectives, and a rank whose part is smaller would leave the
    others waiting. Each chunk of the loader gives one row of float64 sums; rows are put together over the ranks and
    added in order. The model is left as it was: buffers that differ between ranks are averaged for as long as it runs.

    Args:
        tick: called before each chunk, so that a long evaluation can show that it is alive.
        tta: "none", "mirror" or "shift", as `averaged` has them.
        devices: several of this process that take chunks in turn, the model's own first (where `model` is in
            nn.DataParallel, its GPUs); whole chunks, so that they change no logit.
        synchronized: buffers are the same on all ranks already, as after `sync.synchronize()`: no need to average them.
        observe: called with each of this rank's chunks: logits [b, classes] and labels [b].
    """
    device = "cpu" if world.device.type == "mps" else world.device  # MPS has no float64
    sets = table_on(loader.images, device)
    sums = torch.zeros(loader.chunks, len(fields(Metrics)), dtype=torch.float64, device=device)
    for chunk, logits, labels in outputs(model, loader, world, precision, tick, tta, devices, synchronized):
        logits, labels = logits.to(device), labels.to(device)
        sums[chunk] = _sums(logits, labels) if sets is None else _sums_of_sets(logits, sets[labels])
        observe(logits, labels)
    # all other ranks hold zeros in a chunk's row, so this sum rounds nothing
    top1, top5, loss, count = world.sum(sums).sum(dim=0).tolist()
    return Metrics(top1 / count, top5 / count, loss / count, int(count))


def outputs(
    model: nn.Module,
    loader: EvalLoader,
    world: World,
    precision: str = "fp32",
    tick: Callable[[], None] = lambda: None,
    tta: str = "none",
    devices: Sequence[torch.device] = (),
    synchronized: bool = False,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """This rank's chunks: their numbers, logits [b, classes] of float32 or float64, and labels int64 [b].

    The arguments are those of `evaluate`. What predicts goes through here too, so both give the same bits.
    """
    devices = devices or replica_devices(model) or [world.device]
    bare, ranks = unwrap(model), 1 if synchronized else world.size
    context = autocast(precision, world.device)
    with preserved(bare.modules() if ranks > 1 else ()), eval_mode(bare), torch.no_grad():
        average_buffers(bare, ranks)
        turns = cycle(zip(copies(bare, devices), devices, strict=True))
        for chunk, images, labels in loader:
            tick()
            copy, where = next(turns)  # the host runs ahead of the devices, so that they work side by side
            with context():
                logits = averaged(copy, aligned(images.to(where, non_blocking=True)), tta)
            yield chunk, logits.float() if logits.dtype != torch.float64 else logits, labels
        if is_sharded(bare) and loader.short:  # the others' last chunk wants this rank's parts of the weights
            with context():
                averaged(bare, loader.blank(), tta)


def averaged(model: nn.Module, images: Tensor, tta: str) -> Tensor:
    """Logits float [b, classes] of images [b, C, H, W], over several views of each where `tta` asks for them.

    "mirror": the mean over the image and its mirror image. "shift": the mean of that and of the same over the image
    moved by one pixel up and left, and down and right, its edges reflected. They are the views of the "level 1" and
    "level 2" test-time augmentation in arXiv:2404.00498, of which its published accuracies use the second.
    """
    if tta == "none":
        return model(images)  # type: ignore[no-any-return]
    # a copy: where the model replays a CUDA graph, its next call writes into the same memory
    mirrored: Tensor = (model(images).clone() + model(images.flip(3))) / 2
    if tta == "mirror":
        return mirrored
    h, w = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    moved = [averaged(model, padded[:, :, at : at + h, at : at + w], "mirror") for at in (0, 2)]
    return mirrored / 2 + (moved[0] + moved[1]) / 4


def _sums(outputs: Tensor, labels: Tensor) -> Tensor:
    """A batch's sum for each field of `Metrics`: correct at 1, correct at 5, summed loss, count; float64 [4]."""
    losses = F.cross_entropy(outputs, labels, reduction="none")
    # the rank of the true class; ties and nan count against the model, so constant or broken outputs score nothing
    score = outputs.gather(1, labels[:, None])
    better = (~(outputs < score)).sum(dim=1) - 1
    return _added(better < 1, better < 5, losses)


def _sums_of_sets(outputs: Tensor, truth: Tensor) -> Tensor:
    """The same of samples with several labels; truth: bool [b, classes]."""
    losses = F.binary_cross_entropy_with_logits(outputs, truth.to(outputs.dtype), reduction="none").mean(1)
    best = outputs.masked_fill(~truth, -torch.inf).amax(dim=1)
    better = (~truth & ~(outputs < best[:, None])).sum(dim=1)  # wrong classes at or above the best right one
    bare, silent = ~truth.any(dim=1), (outputs < 0).all(dim=1)
    return _added(torch.where(bare, silent, better < 1), torch.where(bare, silent, better < 5), losses)


def _added(top1: Tensor, top5: Tensor, losses: Tensor) -> Tensor:
    sums = [top1.sum().to(torch.float64), top5.sum().to(torch.float64), losses.to(torch.float64).sum()]
    return torch.stack([*sums, losses.new_full((), len(losses), dtype=torch.float64)])  # no tensor to wait for
