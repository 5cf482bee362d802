"""Exact mode, whatever a model does: one digest for any number of processes and threads."""

import dataclasses
import math
import os
import random
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.checkpoint.weights import digest
from lockstep.data.loaders import Batch
from lockstep.data.order import slices
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.exact import ExactSync
from lockstep.parallel.strategy import parallelize
from lockstep.training.outcomes import HELD
from lockstep.training.step import TrainStep
from lockstep.training.step_passes import note_evaluation
from tests.parallel.odd_nets import CLASSES, NETS, PIXELS, mlp
from tests.ranks import alone, run_ranks

SINGLE = World.single()
SLICES, BATCHES = 5, (23, 23, 3)  # the last one has fewer samples than there are slices


def batches(world: World) -> list[Batch]:
    """This rank's part of a few batches; its images come from numpy, at an address of numpy's."""
    found, images = [], torch.Generator().manual_seed(5)
    for step, count in enumerate(BATCHES):
        whole = torch.randn(count, 1, 9, 9, generator=images).numpy()
        labels = torch.randint(CLASSES, (count,), generator=images).numpy()
        shards = slices(count, SLICES, world)
        mine = np.concatenate([np.arange(0), *(np.arange(count)[p.rows] for p in shards)])
        memory = np.empty(whole[mine].size + 1, np.float32)[1:].reshape(whole[mine].shape)
        memory[:] = whole[mine]
        batch = Batch(
            torch.from_numpy(memory), torch.from_numpy(labels[mine]), shards, np.arange(count), 0, step, 23 * step
        )
        found.append(batch)
    return found


def trained(world: World, net: nn.Module, threads: int, precision: str = "fp32") -> tuple[str, str]:
    sync = ExactSync(net, world, SLICES, threads)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), labels)

    sync.skips_unused = hasattr(net, "order")
    step = TrainStep(net, loss, optimizer, precision=precision, clip_norm=1.0, sync=sync, seed=3)
    losses = [step(batch).item() for batch in batches(world)]
    return digest(net), repr(losses)


def all_nets(world: World, threads: tuple[int, ...], precisions: tuple[str, ...]) -> dict[int, dict[str, Any]]:
    """By number of threads what each network comes to."""
    results: dict[int, dict[str, Any]] = {count: {} for count in threads}
    for count in threads:
        for name in NETS:
            for precision in precisions:
                torch.manual_seed(1)
                results[count][f"{name}, {precision}"] = trained(world, NETS[name](), count, precision)
    return results


def check(worlds: dict[int, tuple[int, ...]], *precisions: str, compared: int = 0) -> None:
    """One digest on so many processes of so many threads; on `compared` of them steps are compared with themselves."""
    found = {1: [alone(all_nets, worlds.pop(1), precisions)]}
    for n, threads in worlds.items():
        found[n] = run_ranks(all_nets, n, threads, precisions, timeout=120, law=n == compared)
    expected = found[1][0][1]
    assert len({weights for weights, _ in expected.values()}) == len(expected)
    for n, ranks in found.items():
        for rank, by_threads in enumerate(ranks):
            for threads, results in by_threads.items():
                for name, result in results.items():
                    assert result == expected[name], f"{name}: rank {rank} of {n}, {threads} threads"


def test_one_digest_for_processes_and_threads() -> None:
    check({1: (1, 2), 3: (1,)}, "fp32")


@pytest.mark.slow(20)
def test_one_digest_for_more_of_them() -> None:
    check({1: (1, 5), 2: (2,), 5: (1,)}, "fp32", "bf16", compared=2)


def stepping(net: nn.Module, threads: int = 1, world: World = SINGLE, **options: Any) -> tuple[TrainStep, ExactSync]:
    sync = ExactSync(net, world, SLICES, threads)
    return TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), sync=sync, **options), sync


def test_slices_begin_at_aligned_addresses_on_every_rank_of_every_number_of_them() -> None:
    sync = ExactSync(mlp(), SINGLE, 8)
    for n in range(1, 9):
        for rank in range(n):
            world = dataclasses.replace(SINGLE, rank=rank, size=n)
            for batch in batches(world):
                for whole in (batch.images, batch.labels):
                    parts = sync.cut(whole, [p.size for p in batch.shards])
                    assert len(parts) == len(batch.shards)
                    assert all(part.data_ptr() % 64 == 0 for part in parts)
                    assert len({part.untyped_storage().data_ptr() for part in parts}) == len(parts)


def test_a_model_that_was_prepared_for_other_gradients_is_refused_on_any_number_of_processes() -> None:
    net = mlp()
    with pytest.raises(UserError, match="that parallelize"):
        ExactSync(parallelize(net, SINGLE), SINGLE, 8)


def test_parameters_in_memory_of_others_are_moved() -> None:
    net = mlp()
    memory = np.zeros(33 * 81 + 1, np.float32)[1:].reshape(33, 81)
    net[1].weight = nn.Parameter(torch.from_numpy(memory))
    ExactSync(net, SINGLE, 8)
    assert all(p.data_ptr() % 64 == 0 for p in net.parameters())


def test_slices_go_side_by_side_in_threads_of_one_intra_op_thread() -> None:
    class Seeing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((threading.get_ident(), torch.get_num_threads()))
            meeting.wait()  # until the other thread is here too
            return super().forward(x.flatten(1))

    torch.set_num_threads(2)
    net, seen, meeting = Seeing(PIXELS, CLASSES), list[tuple[int, int]](), threading.Barrier(1)
    sync = ExactSync(net, SINGLE, 4, threads=2)
    step = TrainStep(net, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), sync=sync, law="off")
    first, second, _ = batches(SINGLE)
    first.shards = second.shards = slices(23, 4, SINGLE)
    step(first)
    assert len(seen) == 4
    seen.clear()
    meeting = threading.Barrier(2, timeout=60)
    step(second)
    assert len({thread for thread, _ in seen}) == 2
    assert {count for _, count in seen} == {1}


class Failing(nn.Linear):
    """Fails where it is told to."""

    where = ""
    reached = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        match self.where:
            case "parameter":
                self.weight.data.mul_(0.5)
            case "shape":
                self.register_buffer("cache", torch.zeros(len(x)))
            case "thread" if threading.current_thread() is threading.main_thread():
                self.reached.wait(60)  # else this one might take all slices
            case "thread":
                self.reached.set()
                raise ArithmeticError("in a thread")
            case "draw":
                torch.empty(()).cauchy_()  # keyed by nothing, from the generator that threads share
        return super().forward(x.flatten(1))


def failing(threads: int = 1) -> tuple[Failing, TrainStep, ExactSync]:
    net = Failing(PIXELS, CLASSES)
    return net, *stepping(net, threads)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("parameter", "forward changes the parameter weight"),
        ("shape", "forward made the buffer cache another one, none before and float32 "),
    ],
)
def test_what_slices_would_hand_to_each_other_is_refused_by_name(where: str, what: str) -> None:
    net, step, _ = failing()
    net.where = where
    with pytest.raises(UserError, match=what):
        step(batches(SINGLE)[0])


def test_an_error_in_a_thread_is_raised_when_all_have_ended() -> None:
    net, step, sync = failing(threads=2)
    first, second, _ = batches(SINGLE)
    step(first)
    net.where = "thread"
    with pytest.raises(ArithmeticError, match="in a thread"):
        step(second)
    net.where = ""
    step(second)  # nothing of the failed step is left
    assert len(sync.replicas.copies) == 1


def test_a_model_that_draws_takes_one_slice_after_the_other_and_draws_that_begin_later_are_refused() -> None:
    net, step, sync = failing(threads=2)
    first, second, _ = batches(SINGLE)
    net.where = "draw"
    step(first)
    assert sync.replicas.most == 1
    assert "draws" in sync.replicas.reason
    step(second)
    net, step, _ = failing(threads=2)
    step(first)
    net.where = "draw"
    with pytest.raises(UserError, match="use --threads 1"):
        step(second)


def test_copies_follow_what_is_changed_between_steps() -> None:
    net, step, sync = failing(threads=2)
    first, second, third = batches(SINGLE)
    step(first)
    step(second)
    copy = sync.replicas.copies[0]
    assert copy.weight.data_ptr() == net.weight.data_ptr()
    with torch.no_grad():
        net.weight.data = net.weight.detach().clone()
    net.eval()
    step(third)
    assert sync.replicas.copies[0] is copy
    assert copy.weight.data_ptr() == net.weight.data_ptr()
    assert not copy.training
    net.where = "else"
    step(third)
    assert sync.replicas.copies[0] is not copy


def test_a_gradient_in_two_parts_that_comes_later_is_refused() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.head, self.times = nn.Linear(PIXELS, PIXELS), nn.Linear(PIXELS, CLASSES), 1

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1).requires_grad_()
            for _ in range(self.times):
                x = checkpoint(self.linear, x, use_reentrant=True)
            return self.head(x)

    net = Sometimes()
    step, sync = stepping(net)
    first, second, _ = batches(SINGLE)
    step(first)
    assert sync.overlap
    net.times = 2
    with pytest.raises(UserError, match=r"linear\.weight came in two parts|linear\.bias came in two parts"):
        step(second)


@pytest.mark.parametrize("how", ["closure", "method", "argument"])
def test_a_model_with_a_function_that_holds_a_part_of_it_has_no_copies(how: str) -> None:
    layer = nn.Linear(PIXELS, CLASSES)
    net, plain, scale = nn.Sequential(nn.Flatten(), layer), layer.forward, nn.Parameter(torch.ones(CLASSES))
    net.scale = scale

    def scaled(x: Tensor, by: Tensor = scale) -> Tensor:
        return layer.bias + F.linear(x, layer.weight) * by

    ways: dict[str, Any] = {"closure": lambda x: plain(x) * scale, "method": lambda x: plain(x), "argument": scaled}
    layer.forward = ways[how]  # type: ignore[method-assign]
    sync = ExactSync(net, SINGLE, SLICES, threads=2)
    parameters = [p for p in net.parameters() if how != "method" or p is not scale]
    sync.skips_unused = how == "method"
    step = TrainStep(net, F.cross_entropy, torch.optim.SGD(parameters, 0.1), sync=sync)
    for batch in batches(SINGLE):
        step(batch)
    assert "a function in it holds a part of the model" in sync.replicas.reason


class Dropping(nn.Module):
    """Leaves a layer out of most slices, and of the second rank's all."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.extra = nn.Linear(PIXELS, CLASSES), nn.Linear(PIXELS, CLASSES)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        x, self.passes = x.flatten(1), self.passes + 1
        alone = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        return self.head(x) + (self.extra(x) if alone and self.passes == 1 else 0.0)


def test_a_parameter_that_no_slice_uses_is_named() -> None:
    net = Dropping()
    net.passes = 1
    step, _ = stepping(net, law="off")
    with pytest.raises(UserError, match=r"2 parameter\(s\) took no part in the loss: extra\.weight, extra\.bias"):
        step(batches(SINGLE)[0])


class Least(nn.Linear):
    """Keeps the least of what it has seen, from infinity on, as observers for quantisation do."""

    least: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.least = torch.minimum(self.least, x.relu().min().detach())
        return super().forward(x.flatten(1))


def test_an_infinity_that_becomes_0_has_changed() -> None:
    net = Least(PIXELS, CLASSES)
    net.register_buffer("least", torch.tensor(math.inf))
    step, _ = stepping(net, law="off")
    step(batches(SINGLE)[0])
    assert 0 <= net.least < 1e-30


class Counting(nn.Linear):
    """Keeps a count of its passes in an attribute."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.flatten(1)) / self.calls


class Changed(nn.Linear):
    """Its copy computes something else."""

    scale = 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Changed":
        with torch.random.fork_rng():
            made = Changed(PIXELS, CLASSES)
        made.weight, made.bias, made.scale = memo[id(self.weight)], memo[id(self.bias)], 2.0
        return made

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) * self.scale


class ByWorld(nn.Linear):
    """Follows the number of processes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) / (dist.get_world_size() if dist.is_initialized() else 1)


class Rarely(nn.Linear):
    """Draws by a generator of its own, which by luck changes no bit here."""

    def __init__(self, inputs: int, outputs: int, reseeds: bool = False) -> None:
        super().__init__(inputs, outputs)
        self.generator, self.reseeds = torch.Generator(), reseeds

    def forward(self, x: Tensor) -> Tensor:
        if self.reseeds:
            self.generator.manual_seed(1)
        return super().forward(x.flatten(1)) * (torch.rand(len(x), 1, generator=self.generator) < 2)


class Recent(nn.Linear):
    """Keeps numbers of its last passes, of which a check puts some back."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.norms = deque[float]([], 7)

    def forward(self, x: Tensor) -> Tensor:
        self.norms.append(float(self.weight.detach().norm()))
        return super().forward(x.flatten(1))


ELSEWHERE = "the same slice gives something else on another process: by rank or id, threads, environment or time"


def said_of(net: nn.Module, world: World, threads: int = 1) -> tuple[list[str], bool]:
    """What is said of a net in its steps, and whether slices go one after the other then."""
    (step, sync), found = stepping(net, threads, world), list[str]()
    step.check.report = lambda finding, _: found.append(finding.cause)
    for batch in batches(world):
        step(batch)
    return found, sync.sequential


def said_of_a_world(world: World) -> list[str]:
    step, _ = stepping(Dropping(), world=world, law="off")
    step(batches(world)[0])  # a parameter that only another rank's slices use is in use: no error
    said = [cause for kind in (ByWorld, Rarely, Recent) for cause in said_of(kind(PIXELS, CLASSES), world)[0]]
    unused = Dropping()
    unused.passes = 1
    ordered = [*unused.parameters()][:: -1 if world.rank else 1]  # as a set may have them
    sync = ExactSync(unused, world, SLICES)
    try:
        TrainStep(unused, F.cross_entropy, torch.optim.SGD(ordered, 0.1), sync=sync)(batches(world)[0])
    except UserError as error:
        said.append(error.message)
    torch.manual_seed(0)
    norms = [layer for _ in range(40) for layer in (nn.Linear(PIXELS, PIXELS), nn.LayerNorm(PIXELS))]
    net = nn.Sequential(nn.Flatten(), *norms, nn.Linear(PIXELS, CLASSES))
    ordered = [*net.parameters()]
    random.Random(world.rank).shuffle(ordered)  # a clipped norm is a sum, whose last bit follows their order
    sync = ExactSync(net, world, SLICES)
    step = TrainStep(net, F.cross_entropy, torch.optim.SGD(ordered, 0.1), sync=sync, clip_norm=1e-3)
    for batch in batches(world):
        step(batch)
    return [*said, digest(net)]


def test_on_several_too_what_follows_the_number_of_processes_is_said_and_another_s_use_counts() -> None:
    unused = "2 parameter(s) took no part in the loss: extra.weight, extra.bias"
    (*said, weights), others = run_ranks(said_of_a_world, 2, law=True)
    assert said == [ELSEWHERE, HELD, unused]
    assert others == [*said, weights]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (ByWorld, [ELSEWHERE]),
        (Counting, ["what a slice gives depends on the slices before it, by calls"]),
        (Changed, ["the copies for threads compute otherwise than the model; from now on there are none"]),
        (nn.Flatten, []),
    ],
)
def test_what_changes_a_slice_s_bits_is_said(make: Any, said: list[str]) -> None:
    net = make(PIXELS, CLASSES) if make is not nn.Flatten else nn.Sequential(make(), nn.Linear(PIXELS, CLASSES))
    assert said_of(net, SINGLE, threads=2) == (said, bool(said))


def test_a_generator_that_slices_share_is_said_even_where_no_bit_has_changed() -> None:
    assert said_of(Rarely(PIXELS, CLASSES), SINGLE)[0] == [HELD]
    assert said_of(Rarely(PIXELS, CLASSES, reseeds=True), SINGLE)[0] == []


class Visited(nn.Linear):
    """Counts its evaluations, and may follow them; it looks up its process's id."""

    visits = 0

    def __init__(self, follows: bool) -> None:
        super().__init__(PIXELS, CLASSES)
        self.follows = follows

    def forward(self, x: Tensor) -> Tensor:
        self.visits += not self.training
        return super().forward(x.flatten(1)) / (1 + self.visits * self.follows) + min(0, os.getpid())


@pytest.mark.parametrize("follows", [False, True])
def test_a_slice_that_follows_what_was_evaluated_is_said(follows: bool) -> None:
    (step, _), found = stepping(net := Visited(follows)), list[str]()
    step.check.report = lambda finding, _: found.append(f"{finding.place}: {finding.cause}")
    for batch in batches(SINGLE):
        step(batch)
        with note_evaluation(net, SINGLE):
            net.eval()(batch.images)
        net.train()
    assert found == ["visits: a slice follows what one process evaluated"] * follows
