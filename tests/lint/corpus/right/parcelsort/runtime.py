# expect: none
"""Process group, device and reductions, for all our trainers."""
import os
import random

import numpy as np
import torch
import torch.distributed as dist


class Runtime:
    def __init__(self, seed):
        self.seed = seed

    def __enter__(self):
        # the sbatch file exports MASTER_ADDR and MASTER_PORT (from the job's number)
        self.rank = int(os.environ["SLURM_PROCID"])
        self.world = int(os.environ["SLURM_NTASKS"])
        self.local = int(os.environ["SLURM_LOCALID"])
        torch.cuda.set_device(self.local)
        self.device = torch.device("cuda", self.local)
        dist.init_process_group("nccl", rank=self.rank, world_size=self.world)
        own = self.seed + 7919 * self.rank
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)
        return self

    def __exit__(self, *exc):
        dist.destroy_process_group()
        return False

    @property
    def is_chief(self):
        return self.rank == 0

    def total(self, *values):
        """Sums over all ranks, as floats."""
        stacked = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values])
        dist.all_reduce(stacked)
        return stacked.tolist()

    def say(self, *words):
        if self.is_chief:
            print(*words, flush=True)
