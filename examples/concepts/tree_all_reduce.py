"""All-reduce by a binary tree: few steps, but whole tensors, and rank 0 in all of them.

python examples/concepts/tree_all_reduce.py
"""

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.config import Execution


def tree_all_reduce(tensor: torch.Tensor, rank: int, size: int) -> int:
    """Add `tensor` over all ranks, in place, for any number of ranks; returns the bytes that this rank sent."""
    sent, far, arrived = 0, 1, torch.empty_like(tensor)
    while far < size:  # up: of two ranks `far` apart the higher sends its sum to the lower
        if rank % (2 * far) == far:
            dist.send(tensor, rank - far)
            sent += tensor.nbytes
        elif rank % (2 * far) == 0 and rank + far < size:
            dist.recv(arrived, rank + far)
            tensor += arrived
        far *= 2
    while far > 1:  # down: the same way back
        far //= 2
        if rank % (2 * far) == far:
            dist.recv(tensor, rank - far)
        elif rank % (2 * far) == 0 and rank + far < size:
            dist.send(tensor, rank + far)
            sent += tensor.nbytes
    return sent


def main(world: ls.World) -> None:
    mine = torch.randint(-100, 100, (1_000_000,), generator=torch.Generator().manual_seed(world.rank)).float()
    whole = mine.clone()
    dist.all_reduce(whole)
    sent = tree_all_reduce(mine, world.rank, world.size)
    for rank, (equal, count) in enumerate(world.gather([mine.equal(whole), sent])):
        world.print(f"rank {rank}: the sums of all_reduce: {equal}, sent {count:,} of {mine.nbytes:,} bytes")


if __name__ == "__main__":
    ls.launch(main, nproc=4, execution=Execution(device="cpu"))
