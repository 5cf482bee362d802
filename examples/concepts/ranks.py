"""What each process knows of itself and the others, and a sum over a part of them.

python examples/concepts/ranks.py
"""

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.config import Execution


def main(world: ls.World) -> None:
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])  # each rank takes part in making each group
    pair = low if world.rank < 2 else high
    assert isinstance(pair, dist.ProcessGroup)
    of_pair, of_all = torch.tensor([world.rank]), torch.tensor([world.rank])
    dist.all_reduce(of_pair, group=pair)
    dist.all_reduce(of_all)
    for row in world.gather([world.rank, world.local_rank, dist.get_rank(pair), int(of_pair), int(of_all)]):
        world.print("rank {} of 4, local rank {}, {} in its pair: sum of the pair {}, of all {}".format(*row))
    world.print(f"backend {world.backend}, device {world.device}")


if __name__ == "__main__":
    ls.launch(main, nproc=4, execution=Execution(device="cpu"))
