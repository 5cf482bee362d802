# expect: none
import os

import torch
import torch.distributed as dist


class Comm:
    """The process group as a context manager, filled from SLURM's variables."""

    def __enter__(self):
        self.rank = int(os.environ["SLURM_PROCID"])
        self.size = int(os.environ["SLURM_NTASKS"])
        self.device = torch.device("cuda", int(os.environ["SLURM_LOCALID"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", rank=self.rank, world_size=self.size)
        return self

    def __exit__(self, *exc):
        dist.destroy_process_group()

    @property
    def chief(self):
        return self.rank == 0

    def say(self, text):
        if self.chief:
            print(text, flush=True)

    def sum(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item()
