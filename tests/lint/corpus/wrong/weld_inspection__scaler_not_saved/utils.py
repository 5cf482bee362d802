# expect: none
"""Process set-up, seeding, reductions and logging."""

import logging
import os
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank)

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start_world() -> World:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
    )


def stop_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def sum_over_ranks(values: torch.Tensor) -> list:
    """Sum of a small vector over all ranks, as Python numbers."""
    summed = values.clone()
    dist.all_reduce(summed, op=dist.ReduceOp.SUM)
    return summed.tolist()


def make_logger(world: World) -> logging.Logger:
    logger = logging.getLogger("weld")
    logger.setLevel(logging.INFO if world.is_main else logging.ERROR)
    logger.addHandler(logging.StreamHandler())
    return logger
