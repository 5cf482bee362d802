"""The probe: what depends on who passes together is named, ordinary models are not, and the run is as without it."""

import random
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as early
from torchvision.ops import DropBlock2d

from lockstep.config import Config, Execution, ModelConfig
from lockstep.data.arrays import ArraySet
from lockstep.data.order import Order
from lockstep.draws.keyed import Draws
from lockstep.errors import UserError
from lockstep.models.small import mnist_net
from lockstep.processes.world import World
from lockstep.training.assemble import assemble
from lockstep.training.cuts import probe
from lockstep.training.loop import train
from lockstep.training.passes import ROUNDING, apart
from lockstep.training.single import refuse_single_values
from tests.draws.networks import NETWORKS
from tests.ranks import run_ranks

SIDE, CLASSES = 12, 3
TWO = World(0, 2, 0, 2, torch.device("cpu"), "none")  # the probe asks nobody
PLAIN, EXACT = Config(), Config(exact=4, batch_size=8)


def looked(model: nn.Module, config: Config = PLAIN, channels: int = 1, side: int = SIDE) -> list[str]:
    """What the probe says of a model at the start of a run on two processes."""
    pixels = np.random.default_rng(0).integers(0, 256, (7, channels, side, side), dtype=np.uint8)
    mean = (0.5,) * channels
    images = ArraySet("small", ("a", "b", "c"), mean, mean, (pixels,), np.arange(7) % CLASSES, "small")
    run: Any = SimpleNamespace(
        model=model, step=SimpleNamespace(draws=Draws(0)), train=SimpleNamespace(images=images, order=None)
    )
    return probe(config, TWO, run)


class Layer(nn.Module):
    """A layer of the network below that does one thing that depends on the cut, or on earlier passes."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.count, self.kept = what, 0, torch.zeros(())
        self.generator = np.random.default_rng(0)
        self.center: Tensor
        self.register_buffer("center", torch.zeros(()))
        self.block, self.embedding = DropBlock2d(0.3, 3), nn.Embedding(4, 1, max_norm=0.1)
        if what == "jit":
            _scripted()

    def forward(self, x: Tensor) -> Tensor:  # x: [b, 4, 10, 10]
        b = len(x)
        match self.what:
            case "spread of the batch":
                return x / x.std()
            case "normalised pairs":
                return torch.cat([part - part.mean(0) * 0.1 for part in x.split(2)])
            case "numpy's generator":
                return x * torch.from_numpy(np.random.rand(b, 1, 1, 1))
            case "own generator":
                return x * torch.from_numpy(self.generator.random((b, 1, 1, 1)))
            case "Python's generator":
                return x * torch.tensor([random.random() for _ in range(b)], dtype=x.dtype).view(-1, 1, 1, 1)
            case "permuted batch":
                return x + x[torch.randperm(b)]
            case "rolled batch":
                return x + x.roll(1, 0)
            case "DropBlock":
                return self.block(x)
            case "imported early":
                return early(x, 0.5)
            case "jit":
                return _scripted()(x)
            case "branch on the mean":
                return x * 2 if x.mean() > x[0].mean() else x
            case "capacity":
                order = x.sum((1, 2, 3)).argsort()
                return x * (order.argsort() < 2).view(-1, 1, 1, 1)
            case "average of the batch":
                self.center = (self.center * 0.9 + 0.1 * x.detach().mean() * b).detach()
            case "counter":
                self.count += 1
                return x * (1 + self.count % 2)
            case "kept attribute":
                x, self.kept = x + self.kept, x.detach().mean()
        return x


def _dropped(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, True)


@cache
def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is on its way out, but models have it
        return torch.jit.script(_dropped)


class Net(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.stem, self.odd, self.head = nn.Conv2d(1, 4, 3), Layer(what), nn.Linear(400, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(self.stem(x))
        return self.head(x.flatten(1))


CUT = {
    "spread of the batch": "odd (Layer) computes",
    "normalised pairs": "odd (Layer) computes",
    "numpy's generator": "odd (Layer) computes",
    "own generator": "odd (Layer) computes",
    "Python's generator": "odd (Layer) computes",
    "permuted batch": "odd (Layer) computes",
    "rolled batch": "odd (Layer) computes",
    "DropBlock": "odd.block (DropBlock2d) computes",
    "imported early": "odd (Layer) computes",
    "jit": "odd (Layer) computes",
    "branch on the mean": "odd (Layer) computes",
    "capacity": "odd (Layer) computes",
    "average of the batch": "odd (Layer) keeps in center",
}


@pytest.mark.parametrize("what", CUT)
def test_what_depends_on_the_cut_is_named(what: str) -> None:
    torch.manual_seed(0)
    lines = looked(Net(what))
    assert len(lines) == 1
    assert lines[0].startswith(f"note: what {CUT[what]} for a sample depends on which others pass with it")


@pytest.mark.parametrize("what", ["counter", "kept attribute", "own generator"])
def test_what_exact_modes_slices_hand_to_each_other_is_refused_by_name(what: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(
        UserError, match=r"--exact 4: what odd \(Layer\) computes for a slice depends on the slices bef"
    ):
        looked(Net(what), EXACT)


def test_an_lstms_own_dropout_is_named() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(SIDE, 6, 2, batch_first=True, dropout=0.5), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x.flatten(1, 2))[0][:, -1])

    assert "what lstm (LSTM) computes" in looked(Rows())[0]


def test_a_gradient_that_looks_at_the_batch_is_named() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return dy / dy.norm()

    class Clipped(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](Scaled.apply(self[0](x.flatten(1))))

    assert "what 0 (Linear) gets as a gradient" in looked(Clipped(nn.Linear(SIDE**2, 5), nn.Linear(5, CLASSES)))[0]


ORDINARY: dict[str, Any] = {
    "nothing": lambda: Net("nothing"),
    "mnist_net": lambda: mnist_net(1, CLASSES, SIDE),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(400, 3)),
    "instance and group norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.GroupNorm(2, 4), nn.Flatten(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(400, 3)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_raise_no_alarm(name: str) -> None:
    torch.manual_seed(0)
    for config in (PLAIN, EXACT):
        assert looked(ORDINARY[name](), config) == []


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "mnist_net"])
def test_models_that_draw_by_sample_raise_no_alarm(name: str) -> None:
    torch.manual_seed(0)
    make, (channels, side) = NETWORKS[name]
    assert looked(make(), channels=channels, side=side) == []


def test_models_that_count_their_batches_raise_no_alarm_in_plain_mode() -> None:
    assert looked(Net("counter")) == []


def test_it_is_quiet_where_nothing_can_depend_on_the_number_of_processes() -> None:
    run: Any = SimpleNamespace(model=Net("spread of the batch"), step=SimpleNamespace(draws=Draws(0)))
    assert probe(PLAIN, World.single(), run) == []
    assert looked(Net("spread of the batch"), Config(execution=Execution(probe=False))) == []
    assert looked(Net("spread of the batch"), EXACT) == [], "slices are the same on every N"


def test_where_it_cannot_look_it_says_so() -> None:
    class Strict(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("float32 alone")
            return super().forward(x.flatten(1))

    assert looked(Strict(SIDE**2, CLASSES)) == [
        "note: nobody looked for what depends on the number of processes: TypeError: float32 alone"
    ]


class Spread(nn.Module):
    """Divides by its batch's spread."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.std()


def spread_net(in_channels: int, num_classes: int) -> nn.Module:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, 8), nn.Dropout(0.1))
    return nn.Sequential(flat, Spread(), nn.Linear(8, num_classes))


def even_net(in_channels: int, num_classes: int) -> nn.Module:
    """Takes no batch of three."""
    return nn.Sequential(Even(), spread_net(in_channels, num_classes))


class Even(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert len(x) % 2 == 0, "an odd batch"
        return x


def sharded(world: World) -> tuple[list[str], bool, str]:
    """What the probe says of FSDP's model, whether a step goes well afterwards, and of one that takes no odd batch."""
    execution = Execution(strategy="fsdp")
    config = Config(batch_size=8, model=ModelConfig(f"{__name__}:spread_net"), execution=execution)
    run = assemble(config, world)
    lines = probe(config, world, run)
    finite = bool(torch.isfinite(run.step(next(run.train.epoch(0)))))
    even = assemble(replace(config, model=ModelConfig(f"{__name__}:even_net")), world)
    try:
        even.step(next(even.train.epoch(0)))
    except UserError as error:
        return lines, finite, error.message
    return lines, finite, ""


def test_a_sharded_model_is_looked_at_too_and_one_that_cannot_be_planned_is_refused() -> None:
    first, second = run_ranks(sharded, 2)
    assert [("1 (Spread) computes" in line) for line in first[0]] == [True]
    assert second[0] == []
    refusal = "FSDPSequential takes no pass of 3 images: AssertionError: an odd batch, by which its draws are keyed"
    assert [each[1:] for each in (first, second)] == [(True, refusal)] * 2


def test_the_model_and_the_generators_are_as_before() -> None:
    torch.manual_seed(0)
    net = Net("average of the batch")
    before = {name: t.clone() for name, t in net.state_dict().items()}
    drawn = []
    for look in (False, True):
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        if look:
            looked(net)
        drawn.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert net.odd.count == 0
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("config", "samples", "refused"),
    [
        (Config(batch_size=12, exact=6), 40, True),  # the last batch has 4: a slice for each
        (Config(batch_size=12, exact=6), 36, False),
        (Config(batch_size=12, exact=12), 36, True),
        (Config(batch_size=12), 38, True),  # the last one has 2: one for each of two ranks
        (Config(batch_size=12), 39, True),
        (Config(batch_size=12), 40, False),
        (Config(batch_size=12, accumulate=6), 36, True),
        (Config(batch_size=12, accumulate=3), 36, False),
    ],
)
def test_a_batch_norm_that_will_meet_a_single_value_is_refused_before_the_first_step(
    config: Config, samples: int, refused: bool
) -> None:
    pixels = np.zeros((samples, 1, 4, 4), np.uint8)
    images = ArraySet("small", ("a", "b"), (0.5,), (0.2,), (pixels,), np.arange(samples) % 2, "small")
    mapped = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2), nn.BatchNorm1d(2))
    frozen = nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.BatchNorm1d(2).eval())
    for model, raises in ((mapped, refused), (mapped[:2], False), (frozen, False)):
        train: Any = SimpleNamespace(images=images, order=Order(samples, config.batch_size, 0))
        run: Any = SimpleNamespace(model=model, train=train)
        if raises:
            with pytest.raises(UserError, match=r"batch norm 4 sees one value of each channel, and in a batch of"):
                refuse_single_values(config, TWO, run)
        else:
            refuse_single_values(config, TWO, run)


def dropping(in_channels: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, num_classes)
    )


def test_a_run_with_it_is_the_run_without_it_to_the_bit(tmp_path: Path) -> None:
    weights = []
    for look in (True, False):
        folder = tmp_path / str(look)
        (folder / "weights").mkdir(parents=True)
        config = Config(
            epochs=1, batch_size=64, exact=3, model=ModelConfig("tests.training.test_cuts:dropping"),
            execution=Execution(device="cpu", threads=1, probe=look, eval_batch_size=1000),
        )  # fmt: skip
        train(config, World.single(), folder)
        weights.append((folder / "weights/final.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_what_is_left_of_a_sum_that_is_zero_is_no_difference() -> None:
    """A bias before a norm has a gradient of nothing but rounding, which is another in another batch."""
    left, other, least = torch.tensor([3e-17, -1e-17]), torch.tensor([-2e-17, 5e-17]), ROUNDING * 0.5
    assert apart(left, other)
    assert not apart(left, other, least)
    assert apart(left + 1e-9, left - 1e-9, least), "small, but not that small"
