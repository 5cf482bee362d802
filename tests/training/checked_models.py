"""Models that are another one on another number of processes, with what is to be said of each; and some steps."""

import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as early

from lockstep.distributed.world import World
from lockstep.parallel.strategy import parallelize
from lockstep.training.outcomes import Finding
from lockstep.training.step import TrainStep
from tests.training.test_equal_steps import CLASSES, FEATURES, HIDDEN, Net, batch_of

SIZES = (12, 12, 9, 12, 12, 5)


def case(cause: str = "", place: str = "", what: str = "", **rest: Any) -> Callable[[type], type]:
    """Notes what is expected of a class."""

    def noted(kind: type) -> type:
        kind.expected = {"cause": cause, "place": place, "what": what, **rest}  # type: ignore[attr-defined]
        CASES[kind.__name__] = kind
        return kind

    return noted


CASES: dict[str, type] = {}


class Odd(Net):
    """A net with one odd layer; `odd(x)`, a method of the layer, says what it does."""

    passes: Tensor
    lstm: nn.Module

    def begin(self) -> None:
        self.layer: nn.Module = Layer(self)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.layer(x)))

    def odd(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Layer(nn.Module):
    def __init__(self, owner: Odd) -> None:
        super().__init__()
        self.odd: Any = type(owner).odd

    def forward(self, x: Tensor) -> Any:
        return self.odd(self, x)


@case("layer (Layer): what it computes for a sample depends on which others pass with it")
class Spread(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x / x.std()


@case("layer (Layer): what it computes for a sample")
class Pairs(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return torch.cat([part - part.mean(0) * 0.3 for part in x.split(2)])


@case("layer (Layer): what it computes for a sample")
class Capacity(Odd):
    def odd(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return x * (order.argsort() < 2).view(-1, 1)


@case("layer (Layer): it draws from torch's generator")
class Early(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return early(x, 0.5)


@case("layer (Layer): it draws from numpy's generator")
class NumpyRows(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(len(x), 1) + 0.5)


@case("layer (Layer): it draws from Python's generator")
class PythonRows(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * torch.tensor([random.random() for _ in x], dtype=x.dtype).view(-1, 1)


@case("layer (Layer): what it computes for a sample depends on which others pass with it")
class Blocks(Odd):
    """DropBlock's scale: the draws are those of samples, how many are kept is the batch's."""

    def odd(self, x: Tensor) -> Tensor:
        kept = torch.empty_like(x).bernoulli_(0.8)
        return x * kept * (kept.numel() / kept.sum())


@case("layer (Layer): it draws from torch's generator")
class Halves(Odd):
    """Draws that are no sample's, beside some that are."""

    def odd(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1) * torch.randint(1, 3, (len(x), 1))


_OWN = torch.Generator().manual_seed(1)


@case("a generator that the model holds", "_OWN", what="generator")
class OwnGenerator(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, generator=_OWN, dtype=x.dtype) < 0.9)


@case("statistics over the samples that pass together")
class OwnNorm(Net):
    def begin(self) -> None:
        self.norm = OddNorm(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.norm(x)))


class OddNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + 1e-3).sqrt() * self.weight + self.bias


@case("what its samples do to it on several processes comes to something else", "norm.running_mean", "buffer")
class MomentumBySize(Net):
    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.norm.momentum = len(x) / 50
        return torch.tanh(self.second(self.norm(x)))


@case("a backward hook on it", "second")
class BackwardHook(Net):
    def begin(self) -> None:
        self.second.register_full_backward_hook(lambda module, before, after: (before[0] / before[0].norm(),))


@case("the model: torch.jit compiled it")
class Scripted(nn.Module):
    def __new__(cls) -> Any:
        return torch.jit.script(nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout()).double())


@case("something in the backward pass", "second.weight")
class NodeHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.node = torch.autograd.graph.get_gradient_edge(self.second.weight).node  # that adds up its gradient
        self.node.register_prehook(lambda gradients: (gradients[0] / gradients[0].norm(),))


@case("something in the backward pass")
class OwnBackward(Odd):
    def odd(self, x: Tensor) -> Tensor:
        (y := x.clone()).register_hook(lambda gradient: gradient / gradient.norm())
        return y


@case("", "largest", what="buffer")
class Largest(Net):
    """A buffer that is the largest norm seen, beside what nothing uses."""

    largest: Tensor

    def begin(self) -> None:
        self.register_buffer("largest", torch.ones(()))

    def middle(self, x: Tensor) -> Tensor:
        self.seen, y = x.detach(), torch.tanh(self.second(x)) / self.largest
        self.largest = torch.maximum(self.largest, x.detach().sum(0).abs().max())
        return y


@case("", "queue", what="state")
class Queue(Net):
    """Features of earlier batches."""

    def begin(self) -> None:
        self.queue = deque([torch.ones(HIDDEN, dtype=torch.float64)], 4)

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x - torch.stack([*self.queue]).mean(0)))
        self.queue.extend(x.detach()[:2])
        return y


@case("it follows the samples of one process", "queue", what="state")
class QueueBeforeNorm(Queue):
    """What the queue adds to every sample is lost in a batch norm, until ranks add what is each one's own."""

    def begin(self) -> None:
        super().begin()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(self.norm(x - torch.stack([*self.queue]).mean(0))))
        self.queue.extend(x.detach()[:2])
        return y


@case("", "seen", what="state")
class SeenInAttribute(Net):
    def begin(self) -> None:
        self.seen = 0

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x)) / (1 + self.seen / 50)
        self.seen += len(x)
        return y


@case("layer (Layer): what it computes", starts=3)
class Gated(Odd):
    """Looks at its batch from the fourth pass on."""

    def begin(self) -> None:
        super().begin()
        self.layer.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def odd(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x - x.mean(0) * (self.passes > 3)


@case("layer (Layer): what it computes")
class BySize(Odd):
    """Takes another path for large batches."""

    def odd(self, x: Tensor) -> Tensor:
        return x * 2 if len(x) > 8 else x


@case("takes no", what="pass", only=(1,))
class Fixed(Odd):
    def odd(self, x: Tensor) -> Tensor:
        if len(x) not in (12, 9, 5, 4, 3, 1):
            raise ValueError(f"takes no batch of {len(x)}")
        return x


@case("with another number of threads")
class ByThreads(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.get_num_threads())


@case("with another process id")
class ByProcess(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (1 + os.getpid() % 2)


@case("with another rank")
class ByRank(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (1 + (torch.distributed.is_initialized() and torch.distributed.get_rank()))


@case("the same samples give something else with another number of processes")
class ByNumber(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (1 + (dist.get_world_size() if dist.is_initialized() else 1))


@case("low precision follows the rank, or the number", "bfloat16", what="types")
class LowAmongSeveral(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x) if dist.is_initialized() and dist.get_world_size() > 1 else x


@case("low precision follows the rank, or the number", "bfloat16", what="types")
class LowOfFew(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x) if len(x) < 10 else x


@case("what it computes for a sample depends on which others pass with it")
class Together(Odd):
    """A collective of the model's own: the check's parts are no passes of all ranks."""

    def odd(self, x: Tensor) -> Tensor:
        mean = x.mean(0).detach()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            mean = mean / torch.distributed.get_world_size()
        return x - mean


@case("it follows the samples of one process", "masks", what="state")
class MasksBySize(Net):
    def begin(self) -> None:
        self.masks: dict[int, Tensor] = {}

    def middle(self, x: Tensor) -> Tensor:
        if len(x) not in self.masks:
            self.masks[len(x)] = (torch.rand(len(x), HIDDEN) < 0.8).to(x)
        return torch.tanh(self.second(x)) * self.masks[len(x)]


@case("the processes hold different values of", only=(2, 3))
class Diverged(Net):
    def begin(self) -> None:
        self.scale = 1.0 + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) * self.scale


@case("layer.lstm (LSTM): it draws from torch")
class Lstm(Odd):
    def begin(self) -> None:
        super().begin()
        self.layer.lstm = nn.LSTM(1, 1, 2, batch_first=True, dropout=0.5)

    def odd(self, x: Tensor) -> Tensor:
        return self.lstm(x[..., None])[0][..., 0]


@case("it follows the samples of one process", "table.weight", what="state")
class Renormed(Net):
    """The rows of a table that samples ask for are written anew, to the same effect if they are asked for again."""

    def begin(self) -> None:
        self.table = nn.Embedding(64, HIDDEN, max_norm=0.5)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) + self.table((x.sum(1) * 97).long().abs() % 64)


@case("the model: what it computes for a sample", "at step 1 ")
class EveryFifth(Net):
    """Regularised on steps 0, 5, 10, ..., of which the first alone is one that is checked; in float32."""

    def begin(self) -> None:
        self.number = 0
        self.double = self.float  # type: ignore[method-assign]

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x))
        self.number += self.training
        return y - y.mean(0) if self.number % 5 == 1 else y

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Synced(Net):
    """torch's own layer, which asks the other ranks where there are any."""

    def begin(self) -> None:
        self.norm = nn.SyncBatchNorm(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.norm(x)))


def found(
    world: World,
    make: Callable[[], nn.Module],
    loss: Any = F.cross_entropy,
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> list[Any]:
    """What is reported of some steps; what is said comes first, and is one sentence."""
    torch.manual_seed(0)
    model = parallelize(make(), world)
    trained = [p for p in model.parameters() if p.requires_grad]
    step = TrainStep(model, loss, torch.optim.SGD(trained, 0.1, momentum=0.5), **options)
    findings: list[Finding] = []

    def report(finding: Finding, first: bool) -> None:
        assert first == (not findings)
        findings.append(finding)

    step.check.report = report
    for t, n in enumerate(sizes):
        step(batch_of(world, n, t))
    return [(each.what, each.place, each.cause, each.message) for each in findings]
