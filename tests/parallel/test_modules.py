"""Buffers are kept and put back by place: a forward pass may give a module another tensor."""

import math

import torch
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.parallel.buffers import average_buffers
from lockstep.parallel.module_state import Kept, aligned, flattened, preserved_buffers
from tests.ranks import run_ranks


class Reassigning(nn.Module):
    """A moving centre that is a new tensor after each pass, a mask with infinities, a flag, a count, complex values."""

    center: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("mask", torch.full((3,), -math.inf))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.center = 0.9 * self.center + 0.1 * x.mean(0)
        self.seen.fill_(True)
        self.steps += 1
        self.phase.mul_(1j)
        return x - self.center


def test_what_was_there_is_put_back_with_its_value() -> None:
    module = nn.Sequential(Reassigning(), nn.BatchNorm1d(3))
    before = {name: (b, b.clone()) for name, b in module.named_buffers()}
    with preserved_buffers(module.modules()):
        module(torch.randn(5, 3))
        assert module[0].center is not before["0.center"][0]
        module[0].register_buffer("new", torch.ones(1))
    assert before.keys() == dict(module.named_buffers()).keys()
    for name, b in module.named_buffers():
        assert b is before[name][0]
        assert torch.equal(b, before[name][1])


def test_a_tensor_that_two_modules_share_stays_shared() -> None:
    module = nn.Sequential(Reassigning(), Reassigning())
    module[1].register_buffer("steps", module[0].get_buffer("steps"))
    kept = Kept(module.modules())
    kept.places.put(kept.places.copies())
    assert module[0].steps is module[1].steps
    assert module[0].steps is not kept.places.held[1]["steps"]


def test_an_address_that_torch_would_not_give_is_left() -> None:
    x = torch.arange(20.0)
    assert aligned(x) is x
    copy = aligned(x[3:])
    assert copy.data_ptr() % 64 == 0
    assert torch.equal(copy, x[3:])


def averaged(world: World) -> dict[str, object]:
    module = Reassigning().double()
    module.center = torch.tensor([0.1, 1 / 3, float(world.rank)], dtype=torch.float64)
    module.mask[0] = world.rank
    module.phase[0] = torch.tensor(1j * world.rank)
    module.seen.fill_(world.rank == 0)
    module.steps.fill_(10 + world.rank)
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    module.register_buffer("equal", values.clone())  # (x + x + x) / 3 would change some
    average_buffers(module, world.size)
    found = {name: buffer.tolist() for name, buffer in module.named_buffers()}
    return found | {"equal": torch.equal(module.get_buffer("equal"), values)}


def test_ranks_buffers_become_their_mean_and_what_is_equal_keeps_its_bits() -> None:
    expected = {"center": [0.1, 1 / 3, 1.0], "mask": [1.0, -math.inf, -math.inf], "phase": [1j, 1]}
    assert run_ranks(averaged, 3) == [{**expected, "seen": True, "steps": 10, "equal": True}] * 3


def test_tensors_of_several_devices_come_together_on_the_first_ones() -> None:
    flat = flattened([torch.zeros(2, device="meta"), torch.zeros(3, 1)], torch.float64)
    assert (flat.device.type, flat.shape, flat.dtype) == ("meta", (5,), torch.float64)
