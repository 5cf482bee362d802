"""Bytes through each rank's link for one sum of gradients: one server, a server for each part, a ring.

python examples/concepts/busiest_link.py
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import lockstep as ls
from lockstep.config import Execution


def one_server(gradient: Tensor, rank: int, size: int) -> tuple[int, int]:
    """Rank 0 takes in every gradient and gives out the sum; returns (bytes out, bytes in) of this rank's link."""
    n = gradient.nbytes
    if rank:
        dist.send(gradient, 0)
        dist.recv(gradient, 0)
        return n, n
    arrived = torch.empty_like(gradient)
    for other in range(1, size):
        dist.recv(arrived, other)
        gradient += arrived
    for other in range(1, size):
        dist.send(gradient, other)
    return (size - 1) * n, (size - 1) * n


def a_server_a_part(gradient: Tensor, rank: int, size: int) -> tuple[int, int]:
    """Rank r is the server of part r."""
    out = into = 0
    for server, part in enumerate(gradient.chunk(size)):
        place = (rank - server) % size  # in a world turned so that the part's server is its rank 0
        if place:
            dist.send(part, server)
            dist.recv(part, server)
            out, into = out + part.nbytes, into + part.nbytes
            continue
        arrived = torch.empty_like(part)
        others = [other for other in range(size) if other != server]
        for other in others:
            dist.recv(arrived, other)
            part += arrived
        for other in others:
            dist.send(part, other)
        out, into = out + len(others) * part.nbytes, into + len(others) * part.nbytes
    return out, into


def ring(gradient: Tensor, rank: int, size: int) -> tuple[int, int]:
    """As in ring_all_reduce.py."""
    chunks, moved, arrived = gradient.chunk(size), 0, torch.empty_like(gradient.chunk(size)[0])
    for step in range(2 * (size - 1)):
        going, coming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        pair = [dist.P2POp(dist.isend, going, (rank + 1) % size), dist.P2POp(dist.irecv, arrived, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        coming.copy_(coming + arrived if step < size - 1 else arrived)
        moved += going.nbytes
    return moved, moved


def main(world: ls.World) -> None:
    n = 4_000_000
    for way in (one_server, a_server_a_part, ring):
        add: Callable[[Tensor, int, int], tuple[int, int]] = way
        gradient = torch.full((n // 4,), float(world.rank))
        links = world.gather(list(add(gradient, world.rank, world.size)))
        assert gradient.eq(sum(range(world.size))).all()
        out, into = (" ".join(f"{link[way] / n:.2f}" for link in links) for way in (0, 1))
        world.print(f"{add.__name__:<16} out {out} n   in {into} n")


if __name__ == "__main__":
    ls.launch(main, nproc=4, execution=Execution(device="cpu"))
