"""All-reduce written with send and recv: the ring, its sum beside torch's, and the bytes that each rank sent.

python examples/concepts/ring_all_reduce.py
"""

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.config import Execution


def ring_all_reduce(tensor: torch.Tensor, rank: int, size: int) -> int:
    """Add `tensor` (length a multiple of `size`) over all ranks, in place; returns the bytes that this rank sent."""
    chunks, left, right = tensor.chunk(size), (rank - 1) % size, (rank + 1) % size
    arrived, sent = torch.empty_like(chunks[0]), 0
    for step in range(2 * (size - 1)):
        going = chunks[(rank - step) % size]
        coming = chunks[(rank - step - 1) % size]
        both = [dist.P2POp(dist.isend, going, right), dist.P2POp(dist.irecv, arrived, left)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if step < size - 1:
            coming += arrived  # reduce-scatter: every step adds one more rank's part
        else:
            coming.copy_(arrived)  # all-gather: complete sums travel round
        sent += going.nbytes
    return sent


def main(world: ls.World) -> None:
    mine = torch.randint(-100, 100, (1_000_000,), generator=torch.Generator().manual_seed(world.rank)).float()
    whole = mine.clone()
    dist.all_reduce(whole)
    sent = ring_all_reduce(mine, world.rank, world.size)
    for rank, (equal, count) in enumerate(world.gather([mine.equal(whole), sent])):
        world.print(f"rank {rank}: the sums of all_reduce: {equal}, sent {count:,} of {mine.nbytes:,} bytes")


if __name__ == "__main__":
    ls.launch(main, nproc=4, execution=Execution(device="cpu"))
