"""The check against divergence sees any bit and any exchange, names rank, tensor and step, and never cries wolf."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.config import OptimConfig
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.monitoring import desync
from lockstep.parallel.strategy import parallelize
from lockstep.training import optimizers
from tests.ranks import run_ranks

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def words(tensor: Tensor) -> Tensor:
    """The same memory as integers, flat."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    return flat.view(INTEGERS[flat.element_size()])


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit in place."""
    target = words(tensor.detach())
    width = 8 * target.element_size()
    mask = 1 << bit if bit < width - 1 or target.dtype == torch.uint8 else -(1 << bit)
    target[element] ^= mask


@given(st.sampled_from(DTYPES), st.integers(0, 2**32), st.data())
def test_any_flipped_bit_changes_the_digest(dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    tensor = torch.rand(30, generator=torch.Generator().manual_seed(seed)).mul(5).to(dtype)
    before = desync.digest(tensor)
    element = data.draw(st.integers(0, len(words(tensor)) - 1))
    bit = 0 if dtype == torch.bool else data.draw(st.integers(0, 8 * words(tensor).element_size() - 1))
    flip(tensor, element, bit)
    assert desync.digest(tensor) != before
    flip(tensor, element, bit)
    assert desync.digest(tensor) == before


@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=40), st.sampled_from((torch.float64, torch.int64)), st.randoms()
)
def test_elements_that_change_places_change_the_digest(numbers: list[int], dtype: torch.dtype, random: Any) -> None:
    shuffled = numbers.copy()
    random.shuffle(shuffled)
    same = desync.digest(torch.tensor(numbers, dtype=dtype)) == desync.digest(torch.tensor(shuffled, dtype=dtype))
    assert bool(same) == (numbers == shuffled)


def test_places_far_apart_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(-500, 500)
    whole = desync.digest(tensor)
    monkeypatch.setattr(desync, "_BLOCK", {"cpu": 7})  # worked out in pieces, it is the same digest
    assert desync.digest(tensor) == whole
    moved = tensor.clone()
    moved[[0, 7, 14, 700]] = tensor[[7, 14, 700, 0]]
    assert desync.digest(moved) != whole
    assert desync.digest(tensor.roll(7)) != whole


class Held(TorchDispatchMode):
    """How many bytes an operation's results held at the most, those of before that are still there among them."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and (memory := out.untyped_storage())._cdata not in self.alive and not func.is_view:
            self.alive[memory._cdata] = memory.nbytes()
            weakref.finalize(out, self.alive.pop, memory._cdata)
            self.most = max(self.most, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("elements", [1 << 12, 1 << 16])
def test_memory_beside_the_tensors_does_not_grow_with_them(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desync, "_BLOCK", {"cpu": 1 << 10})
    with Held() as held:
        desync.digest(torch.ones(elements))
    assert 1 << 13 <= held.most - 4 * elements <= 10 << 13, "some pieces as int64, beside the tensor itself"


def test_zero_has_a_sign_and_nothing_a_digest() -> None:
    zeros = torch.zeros(3)
    assert desync.digest(zeros) != desync.digest(torch.tensor([0.0, -0.0, 0.0]))
    assert desync.digest(zeros) != desync.digest(torch.zeros(4))
    assert desync.digest(torch.empty(0)) == 0
    assert desync.digest(torch.tensor(2.0)).shape == ()


def test_the_memory_format_does_not_count() -> None:
    images = torch.rand(2, 3, 4, 5)
    assert desync.digest(images) == desync.digest(images.to(memory_format=torch.channels_last))
    assert desync.digest(images) == desync.digest(images.transpose(0, 1).contiguous().transpose(0, 1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 16, 3))


def trained(world: World, name: str, buffers: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two steps, the same on all ranks (batch norm's buffers only if told so)."""
    bare = net()
    model = parallelize(bare, world)
    optimizer = optimizers.build(bare, OptimConfig(optimizer=name), 0.01)
    for step in range(2):
        generator = torch.Generator().manual_seed(step if buffers else 10 * world.rank + step)
        model(torch.rand(5, 1, 6, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def compared(world: World, *args: Any) -> str:
    try:
        desync.check(world, *args)
    except UserError as error:
        return error.message
    return ""


def all_agree(world: World) -> list[str]:
    found = []
    for name in ("sgd", "adam", "adadelta", "timm:muon"):
        model, optimizer = trained(world, name)
        found.append(compared(world, 7, model, optimizer, lambda buffer: False))
        model, optimizer = trained(world, name, buffers=True)
        found.append(compared(world, 7, model, optimizer))
    return found


@pytest.mark.parametrize("n", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_agree_go_on(n: int) -> None:
    assert (run_ranks(all_agree, n) if n > 1 else [all_agree(World.single())]) == [[""] * 8] * n


def one_bit_each(world: World) -> dict[str, str]:
    """Flip a bit of each kind of thing on one rank, compare, and flip it back."""
    model, optimizer = trained(world, "sgd", buffers=True)
    parts = {
        "weights": (2, model.module[0].weight),
        "rank 0's": (0, model.module[3].bias),
        "momentum": (1, optimizer.state[model.module[3].weight]["momentum_buffer"]),
        "running mean": (2, model.module[1].running_mean),
        "counter": (2, model.module[1].num_batches_tracked),
    }
    found: dict[str, Any] = {"agree": "".join(all_agree(world))}
    for name, (rank, tensor) in parts.items():
        for on in (True, False):
            if world.rank == rank:
                flip(tensor, 0, 0)
            message = compared(world, 40, model, optimizer)
            assert bool(message) == on
            found[name] = message or found[name]
    found["buffers left out"] = ""
    if world.rank == 0:
        flip(model.module[1].running_var, 1, 5)
    found["buffers left out"] = compared(world, 40, model, optimizer, lambda buffer: False)
    if world.rank == 1:
        optimizer.param_groups[0]["lr"] *= 1 + 1e-15
        flip(model.module[3].weight, 7, 31)
    found["two"] = compared(world, 41, model, optimizer, lambda buffer: False)
    return found


def test_a_flipped_bit_is_named() -> None:
    values = run_ranks(one_bit_each, 3)
    assert values[0] == values[1] == values[2]  # one text on all ranks
    assert values[0]["agree"] == "", "ranks that agree go on"
    for name, rank, others, tensor in (
        ("weights", 2, "0, 1", "0.weight"),
        ("rank 0's", 0, "1, 2", "3.bias"),
        ("momentum", 1, "0, 2", "momentum_buffer of 3.weight"),
        ("running mean", 2, "0, 1", "the buffer 1.running_mean"),
        ("counter", 2, "0, 1", "the buffer 1.num_batches_tracked"),
    ):
        text = values[0][name]
        assert text.startswith(f"the ranks differ at step 40: rank {rank} ("), text
        assert f") from ranks {others}, first in {tensor} (1 of " in text, text
        assert "majority" not in text
    assert values[0]["buffers left out"] == ""
    assert "rank 1 (" in values[0]["two"]
    assert "first in 3.weight (2 of " in values[0]["two"]


def other_forms(world: World) -> list[str]:
    model, optimizer = trained(world, "sgd", buffers=True)
    if world.rank == 1:
        flip(model.module[0].bias, 0, 3)
    found = [*all_agree(world), compared(world, 3, model, optimizer)]
    if world.rank == 1:
        del optimizer.state[model.module[0].weight]["momentum_buffer"]
    found.append(compared(world, 4, model, optimizer))
    return found


def test_two_ranks_leave_it_open_which_is_wrong_and_other_contents_are_named() -> None:
    (*agree, first, second), again = run_ranks(other_forms, 2)
    assert again == [*agree, first, second]
    assert agree == [""] * 8
    assert "rank 1 (" in first
    assert "from rank 0, first in 0.bias" in first
    assert "either side may be wrong" in first
    assert "momentum_buffer of 0.weight is missing on rank 1 and (4, 1, 3, 3) torch.float32 on rank 0" in second
