"""The one place that decides how a model is spread: by config for a run, by name for a user's own loop."""

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lockstep
from lockstep.config import CommConfig, Config, Execution
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.module_state import driven, replaced
from lockstep.parallel.strategy import parallelize, spread, sync_of
from lockstep.rng.generators import seeding
from lockstep.training.step import TrainStep
from tests.ranks import run_ranks

SINGLE = World.single()
FSDP = {"strategy": "fsdp"}
WAYS = {
    "ddp": Config(),
    "compressed": Config(comm=CommConfig("bf16")),
    "fsdp": Config(execution=Execution(strategy="fsdp")),
    "exact": Config(exact=4),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))


def on_ranks(world: World) -> tuple[Any, ...]:
    return spread_all(world), own_ddp(world), spread_again(world)


@pytest.fixture(scope="module")
def two() -> list[tuple[Any, ...]]:
    return run_ranks(on_ranks, 2)


def spread_all(world: World) -> dict[str, tuple[str, str, bool]]:
    """Of each way: the kinds of the module and of its sync, and whether the copy beside the model is sharded."""
    found = {}
    for name, config in WAYS.items():
        model, twin = network(), network()
        module, sync = spread(model, world, config, from_host=True, twins=[twin])
        sharded = hasattr(next(twin.parameters()), "full_tensor")
        found[name] = type(module).__name__, type(sync).__name__, sharded
    return found


def test_each_way_has_its_module_and_its_sync(two: list[tuple[Any, ...]]) -> None:
    expected = {
        "ddp": ("LockstepDDP", "DDPSync", False),
        "compressed": ("LockstepDDP", "DDPSync", False),
        "fsdp": ("FSDPSequential", "ShardedSync", True),
        "exact": ("Sequential", "ExactSync", False),
    }
    assert [rank[0] for rank in two] == [expected] * 2
    alone = dict.fromkeys(WAYS, ("Sequential", "GradientSync", False))
    modes = {"exact": ("Sequential", "ExactSync", False)}
    assert spread_all(SINGLE) == alone | modes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fdsp"}, "unknown strategy .fdsp."),
        ({"strategy": None}, "unknown strategy .None."),
        ({"compress": "bf8"}, "unknown compress .bf8."),
        ({"compress": None}, "--compress None is not"),
        ({"strategy": "fsdp", "compress": "bf16"}, "--compress bf16 with --strategy fsdp"),
        ({"model": nn.DataParallel(network())}, "nn.DataParallel gives each GPU its part of a batch"),
        (FSDP | {"model": nn.ParameterList([torch.ones(())])}, "a parameter that is a single number: 0"),
        (FSDP | {"model": nn.ParameterList([torch.ones(0)])}, "a parameter without numbers: 0"),
        (FSDP | {"model": nn.Sequential(network(), nn.Linear(2, 2).double())}, "together: float32 and float64 in one"),
        (FSDP | {"model": nn.Sequential(nn.Linear(2, 2), nn.Flatten())}, "a module of torch.jit: 1"),
    ],
)
def test_a_library_call_is_refused_as_a_flag_is(options: dict[str, Any], message: str) -> None:
    with mock.patch("torch.jit.ScriptModule", nn.Flatten), pytest.raises(UserError, match=message):
        parallelize(**(dict[str, Any](model=network(), world=SINGLE) | options))


@pytest.mark.parametrize(("norm", "message"), [(-1.0, "--clip-norm -1.0 is too small"), (math.nan, "clip-norm nan")])
def test_a_norm_that_no_gradient_is_clipped_to_is_refused(norm: float, message: str) -> None:
    model = network()
    with pytest.raises(UserError, match=message):
        TrainStep(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), clip_norm=norm)


def test_a_model_that_is_where_it_belongs_stays_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert parallelize(model, SINGLE) is model
    assert [str(p.device) for p in model.parameters()] == ["cpu", "cpu", "meta", "meta"]
    assert driven(model) == [torch.device("cpu"), torch.device("meta")]


def test_devices_of_one_model_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of devices that are not here, as the device module is told of them."""
    current, told = SimpleNamespace(index=0), list[tuple[int, int]]()
    module = SimpleNamespace(manual_seed=lambda seed: told.append((current.index, seed)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: replaced(current, index=index))
    reseed = seeding([torch.device("cuda", index) for index in range(3)])
    for seed in (7, 7, 8):
        reseed(seed)
    assert told[:3] == told[3:6]
    assert [index for index, _ in told[:3]] == [0, 1, 2]
    assert told[0] == (0, 7), "one GPU alone draws the same"
    assert len({seed for _, seed in told[:3] + told[6:]}) == 6
    told.clear()
    seeding([torch.device("cuda", 0)])(7)
    assert told == [(0, 7)]


def own_ddp(world: World) -> tuple[str, int]:
    sync = sync_of(nn.parallel.DistributedDataParallel(network()))
    sync.restart()  # nothing to forget, and no error
    return type(sync).__name__, sync.ranks


def test_a_users_own_ddp_is_known_for_what_it_is(two: list[tuple[Any, ...]]) -> None:
    assert [rank[1] for rank in two] == [("DDPSync", 2)] * 2


def test_the_librarys_loader_cuts_exact_slices() -> None:
    """As docs/exact.md has it: a batch of 50 in 8."""
    exact, plain = (lockstep.loaders("digits", SINGLE, batch_size=50, exact=v)[0] for v in (8, 0))
    assert tuple(shard.size for shard in next(exact.epoch(0)).shards) == (7, 7, 6, 6, 6, 6, 6, 6)
    assert [shard.size for shard in next(plain.epoch(0)).shards] == [50]


def step_of(model: nn.Module, **given: Any) -> TrainStep:
    return TrainStep(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def spread_again(world: World) -> tuple[int, bool]:
    """As cells of a notebook that are run again: outputs and DDP's reducer live on. Returns how many were made."""
    model = network()
    outputs = model(torch.rand(2, 2, 5, 5))
    steps = [step_of(parallelize(model, world)) for _ in range(2)]
    parallelize(model, world)
    steps.append(step_of(parallelize(model, world, strategy="ddp")))
    return len(steps), outputs.requires_grad


def test_a_model_may_be_spread_again_while_its_outputs_are_held(two: list[tuple[Any, ...]]) -> None:
    assert [found for _, _, found in two] == [(3, True)] * 2
