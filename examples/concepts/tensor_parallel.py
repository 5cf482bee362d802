"""Two linear layers cut over two ranks: the first by columns, the second by rows, one all-reduce at the end.

python examples/concepts/tensor_parallel.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lockstep as ls
from lockstep.config import Execution


def main(world: ls.World) -> None:
    torch.manual_seed(0)
    x, up, down = torch.randn(8, 64), torch.randn(256, 64), torch.randn(64, 256)
    whole = F.gelu(x @ up.T) @ down.T
    my_up, my_down = up.chunk(world.size)[world.rank], down.chunk(world.size, dim=1)[world.rank]
    mine = F.gelu(x @ my_up.T) @ my_down.T  # each rank's hidden units pass through gelu on their own
    dist.all_reduce(mine)
    off = float((mine - whole).abs().max() / whole.abs().max())
    held = (my_up.numel() + my_down.numel()) / (up.numel() + down.numel())
    for rank, (share, close, sent) in enumerate(world.gather([held, off < 1e-5, mine.nbytes])):
        world.print(
            f"rank {rank} holds {share:.0%} of the weights; as the whole layer: {close}; all-reduced {sent} bytes"
        )


if __name__ == "__main__":
    ls.launch(main, nproc=2, execution=Execution(device="cpu"))
