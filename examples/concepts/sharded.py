"""A sharded step by hand: gradients are scattered as sums, each rank updates its part, weights are gathered.

python examples/concepts/sharded.py
"""

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.config import Execution


def main(world: ls.World) -> None:
    torch.manual_seed(0)
    weights = torch.randn(1000)
    gradient = torch.randn(world.size, 1000)[world.rank]  # each rank has one of its own

    everywhere = weights.clone().requires_grad_()  # data parallel: all-reduce, and the whole update on every rank
    everywhere.grad = gradient.clone()
    dist.all_reduce(everywhere.grad)
    whole = torch.optim.Adam([everywhere])
    whole.step()

    parts = list(gradient.clone().chunk(world.size))
    for owner, part in enumerate(parts):
        dist.reduce(part, dst=owner)  # together a reduce-scatter
    mine = weights.chunk(world.size)[world.rank].clone().requires_grad_()
    mine.grad = parts[world.rank]
    shard = torch.optim.Adam([mine])
    shard.step()
    gathered = [torch.empty_like(part) for part in parts]
    dist.all_gather(gathered, mine.detach())

    kept = [sum(value.numel() for value in o.state[p].values()) for o, p in ((whole, everywhere), (shard, mine))]
    equal = torch.allclose(torch.cat(gathered), everywhere.detach(), rtol=1e-6, atol=1e-6)
    for rank, (same, (all_of_it, part)) in enumerate(world.gather([equal, kept])):
        world.print(f"rank {rank}: the same weights: {same}; numbers of Adam's state {part} instead of {all_of_it}")


if __name__ == "__main__":
    ls.launch(main, nproc=4, execution=Execution(device="cpu"))
