"""The weights after some steps are the same on 1, 2 and 3 processes, whatever hooks, buffers and draws a model has.

Batches have 7, 5, 2 and 7 samples, so shares are uneven and one of three ranks has no sample in the third step.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data.loaders import Batch
from lockstep.data.order import micro_batches
from lockstep.distributed.world import World
from lockstep.parallel.strategy import parallelize
from lockstep.training.step import TrainStep
from tests.ranks import alone, run_ranks

SIZES = (7, 5, 2, 7, 6)
FEATURES, HIDDEN, CLASSES = 6, 8, 3
RATE = 0.5


class Net(nn.Module):
    """Three layers in float64; a case adds something by `begin` and `middle`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.begin()
        self.double()

    def begin(self) -> None: ...

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.first(x))))


class Clamp(torch.autograd.Function):
    """Clips what comes back through it, element by element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-2, 1e-2)


class ClippedInside(Net):
    """A sample's gradient is clipped in the middle of backward, and by a hook on what a batch norm gives."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        (y := self.norm(Clamp.apply(torch.tanh(self.second(x))))).register_hook(lambda gradient: gradient.sign() / 99)
        return y


class ModuleHook(Net):
    """A full backward hook takes the square root of each element."""

    def begin(self) -> None:
        self.second.register_full_backward_hook(
            lambda module, before, after: (before[0].sign() * before[0].abs().sqrt(),)
        )


class LayerDrop(Net):
    """Python's generator decides whether a layer is left out."""

    def middle(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.second(x)) * (2.0 * (random.random() < 0.5))


class SkippedLayer(Net):
    """A layer takes no part in some steps: its parameters have no gradient there, and momentum doesn't move them."""

    def middle(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.second(x)) if random.random() < 0.5 else x


class SparseTable(Net):
    """Rows of a table by the sign of each sample's first feature, with sparse gradients."""

    def begin(self) -> None:
        self.table = nn.Embedding(2, HIDDEN, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.first(x))) + self.table((x[:, 0] > 0).long()))


class NumpyNoise(Net):
    """numpy's generator scales a layer."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) * float(np.random.rand() + 0.5)


class UnkeyedScalar(Net):
    """A number from torch's generator by a function that is keyed by no sample."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) * (0.5 + torch.empty(1, dtype=x.dtype).geometric_(0.5))


class Normal(Net):
    """torch.normal, of the batch's shape."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) + torch.normal(0.0, 0.3, x.shape, dtype=x.dtype)


class Centre(Net):
    """A moving mean of features that forward subtracts, as DINO's."""

    center: Tensor

    def begin(self) -> None:
        self.register_buffer("center", torch.zeros(HIDDEN))

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x - self.center.clone()))
        if self.training:
            self.center.lerp_(x.detach().mean(0), 0.3)
        return y


class ReplacedCentre(Net):
    """The same, with a new tensor in the buffer's place."""

    center: Tensor

    def begin(self) -> None:
        self.register_buffer("center", torch.zeros(HIDDEN))

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x - self.center))
        self.center = 0.7 * self.center + 0.3 * x.detach().mean(0)
        return y


class Instance(Net):
    """torch's own running statistics, over a process's samples."""

    def begin(self) -> None:
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.norm(x.view(-1, 2, 4)).flatten(1)))


class Spectral(Net):
    """A buffer that moves with each pass, and not by its samples."""

    def begin(self) -> None:
        self.second = nn.utils.spectral_norm(self.second)


class Annealed(Net):
    """A counter of passes in floating point, which forward uses."""

    passes: Tensor
    whole: Tensor

    def begin(self) -> None:
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("whole", torch.zeros((), dtype=torch.int64))

    def middle(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.whole += 1
        return torch.tanh(self.second(x)) / (0.2 + torch.exp(-(self.passes + self.whole) / 5))


class SeenSamples(Net):
    """How many samples have passed, in a whole number."""

    seen: Tensor

    def begin(self) -> None:
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x)) / (1 + self.seen / 10)
        self.seen += len(x)
        return y


class Penalty(Net):
    """The slope of the loss is a part of it, through a batch norm."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = self.head(torch.tanh(self.norm(self.second(self.first(x)))))
        (slope,) = torch.autograd.grad(y.logsumexp(1).sum(), x, create_graph=True)
        return y * (1 + slope.norm(dim=1, keepdim=True))


class Contrast(Net):
    """Logits beside the features that they are computed from, which stand there twice."""

    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        h = F.normalize(self.middle(torch.tanh(self.first(x))), dim=1)
        return {"logits": self.head(h), "features": [h, h]}


def contrastive(outputs: dict[str, Any], labels: Tensor) -> Tensor:
    """Khosla et al., "Supervised contrastive learning", 2020, beside cross-entropy."""
    features = outputs["features"][0]
    alike = (labels[:, None] == labels[None]).double().fill_diagonal_(0)
    likely = (features @ features.T / 0.5).masked_fill(torch.eye(len(labels), dtype=torch.bool), -1e9).log_softmax(1)
    own = -(alike * likely).sum(1) / alike.sum(1).clamp(min=1)
    return own.mean() + F.cross_entropy(outputs["logits"], labels)


class NoisyUpdate(torch.optim.SGD):
    """Adds noise of numpy's and Python's to each update."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(torch.from_numpy(np.random.randn(*p.shape)) * 0.01 * random.random())


def hooked(kind: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module], Any]:
    return lambda model: [kind(parameter) for parameter in model.parameters()]


def clip(parameter: nn.Parameter) -> Any:
    return parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))


def clip_in_place(parameter: nn.Parameter) -> Any:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.div_(1 + 10 * p.grad.norm())

    return parameter.register_post_accumulate_grad_hook(hook)


MODELS = (
    Net, ClippedInside, ModuleHook, LayerDrop, NumpyNoise, UnkeyedScalar, Normal, Centre, ReplacedCentre,
    Instance, Spectral, Annealed, SeenSamples, Penalty,
)  # fmt: skip


def frozen(model: nn.Module, is_frozen: bool = True) -> None:
    model.second.requires_grad_(not is_frozen)


class Thawing(Net):
    """Trains its second layer from the second step on, as its forward decides."""

    def begin(self) -> None:
        self.passes = 0
        frozen(self)

    def middle(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes == 2:
            self.second.requires_grad_(True)
        return super().middle(x)


def batch_of(world: World, n: int, step: int, accumulate: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(step)
    images, labels = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64), torch.arange(n) % CLASSES
    shards = micro_batches(n, accumulate, world)
    rows = np.concatenate([np.arange(n)[shard.rows] for shard in shards])
    return Batch(images[rows], labels[rows], shards, np.arange(n), 0, step, step * 7)


def ended(
    world: World,
    make: Callable[[], nn.Module],
    *,
    before: Callable[[nn.Module], Any] = lambda model: None,
    after: Callable[[nn.Module], Any] = lambda model: None,
    between: Callable[[nn.Module, int], Any] = lambda model, step: None,
    optimizer: type[torch.optim.SGD] = torch.optim.SGD,
    accumulate: int = 1,
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
    sizes: tuple[int, ...] = SIZES,
    **options: Any,
) -> list[float]:
    torch.manual_seed(0)
    model = make()
    before(model)
    wrapped = parallelize(model, world, find_unused_parameters=options.pop("find_unused_parameters", False))
    step = TrainStep(wrapped, loss, optimizer(model.parameters(), RATE, momentum=0.5), **options)
    after(model)
    for t, n in enumerate(sizes):
        between(model, t)
        step(batch_of(world, n, t, accumulate))
    step.sync.synchronize()
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()]).tolist()


def everything(world: World) -> dict[str, list[float]]:
    random.seed(world.rank), np.random.seed(world.rank)
    found = {make.__name__: ended(world, make) for make in MODELS}
    for accumulate in (1, 2):
        found[f"skipped, {accumulate}"] = ended(world, SkippedLayer, accumulate=accumulate, find_unused_parameters=True)
    found["sparse"] = ended(world, SparseTable)
    if world.size == 2:  # whose steps are compared with themselves, which takes long
        return found
    for make in (LayerDrop, Centre, UnkeyedScalar):
        found[f"{make.__name__} in micro-batches"] = ended(world, make, accumulate=2)
    for kind in (clip, clip_in_place):
        found[kind.__name__] = ended(world, Net, before=hooked(kind))
        found[f"{kind.__name__}, late"] = ended(world, Net, after=hooked(kind))
        found[f"{kind.__name__}, micro-batches"] = ended(world, Net, before=hooked(kind), accumulate=2, clip_norm=0.02)
    ways: dict[str, Callable[..., list[float]]] = {
        "contrastive": partial(ended, world, Contrast, loss=contrastive, whole_batch=True),
        "frozen at first": partial(ended, world, Net, before=frozen, between=lambda m, t: frozen(m, t < 2)),
        "frozen later": partial(ended, world, Net, between=lambda m, t: frozen(m, t not in (0, 3))),
    }
    for name, way in ways.items():
        found |= {f"{name}, {accumulate}": way(accumulate=accumulate) for accumulate in (1, 2)}
    found["thawed in forward"] = ended(world, Thawing)
    found["noise of numpy's in the update"] = ended(world, Net, optimizer=NoisyUpdate)
    return found


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow(15)), 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, list[float]]]:
    return run_ranks(everything, request.param, law=request.param == 2)


def test_all_ranks_end_with_what_one_process_ends_with(ranks: list[dict[str, list[float]]]) -> None:
    one = alone(everything)
    apart = {name: max(float(np.abs(np.subtract(rank[name], one[name])).max()) for rank in ranks) for name in ranks[0]}
    assert {name: value for name, value in apart.items() if not value < 1e-11} == {}
    assert len({tuple(one[name]) for name in ("Net", "clip", "clip_in_place")}) == 3, "hooks act at all"
