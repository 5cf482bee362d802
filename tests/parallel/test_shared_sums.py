"""Integer sums through memory that the ranks of a machine share: the same bits as through gloo, and nothing left."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from lockstep.distributed.world import World
from lockstep.parallel import fixed_point
from lockstep.parallel.exact import ExactSync
from lockstep.parallel.fixed_point import mapped, write_sum
from tests.parallel.odd_nets import mlp
from tests.parallel.test_exact_laws import trained
from tests.ranks import run_ranks

COUNT = 100


@contextmanager
def open_fails_on(world: World, rank: int) -> Iterator[None]:
    """Within, one rank opens none of the others' memory."""
    if world.rank != rank:
        yield
        return
    with mock.patch.object(fixed_point, "_opened", return_value=None):
        yield


def tell(world: World) -> dict[str, object]:
    regions = mapped(world, COUNT)
    regions[world.rank].fill_(world.rank + 1)
    world.barrier()
    seen = [region.tolist() == [rank + 1] * COUNT for rank, region in enumerate(regions)]
    world.barrier()
    own = [entry for entry in Path("/dev/shm").iterdir() if "lockstep-sums" in entry.name]
    links = [fd.readlink() for fd in list(Path("/proc/self/fd").iterdir()) if fd.is_symlink()]
    left = [str(link) for link in links if "lockstep-sums" in str(link)]
    with mock.patch.object(os, "posix_fallocate", side_effect=OSError) if world.rank == 1 else open_fails_on(world, -1):
        without_room = mapped(world, COUNT)
    with open_fails_on(world, 1):
        closed = mapped(world, COUNT)
    torch.manual_seed(3)
    net = mlp()
    twin = deepcopy(net)
    through_memory = trained(world, net, 1)
    with mock.patch.object(fixed_point, "mapped", return_value=[]):
        through_gloo = trained(world, twin, 1)
        assert not any(bucket.shared for bucket in ExactSync(mlp(), world, 5).buckets)
    used = all(len(bucket.shared) == world.size for bucket in ExactSync(mlp(), world, 5).buckets)
    return {
        "seen": all(seen),
        "left": [str(name) for name in own] + left,
        "agreed": (len(without_room), len(closed)),
        "same": through_memory == through_gloo,
        "used": used,
    }


def test_every_rank_sees_all_integers_and_gets_the_bits_that_gloo_gives() -> None:
    expected = {"seen": True, "left": [], "agreed": (0, 0), "same": True, "used": True}
    assert run_ranks(tell, 3) == [expected] * 3


def test_memory_of_somebody_else_is_not_taken() -> None:
    own = os.memfd_create("lockstep-test")
    try:
        os.ftruncate(own, 8 * 512)
        path = f"/proc/{os.getpid()}/fd/{own}"
        assert fixed_point._opened(path, bytes(16), 512) is not None
        assert fixed_point._opened(path, b"1" * 16, 512) is None
        assert fixed_point._opened("/proc/0/fd/1", bytes(16), 512) is None
        assert fixed_point._opened(path, bytes(16), 513) is None
    finally:
        os.close(own)
    assert mapped(World.single(), COUNT) == []


@pytest.mark.parametrize("shape", [(3,), (1, 3), (), (0,), (2, 3, 5, 7), (300, 300)])
def test_sums_are_written_in_the_order_of_memory(shape: tuple[int, ...]) -> None:
    into = nn.Parameter(torch.empty(shape)).detach()
    if len(shape) == 4:
        into = into.contiguous(memory_format=torch.channels_last)
    parts = [torch.randint(-(1 << 40), 1 << 40, (into.numel(),)) for _ in range(3)]
    write_sum(parts, torch.tensor(2.0**-20), into)
    expected = (parts[0] + parts[1] + parts[2]).to(torch.float32) * 2.0**-20
    assert torch.equal(into.as_strided((into.numel(),), (1,)), expected)
