# expect: none
"""The few things of torch.distributed that the project uses, the same with and without a launcher."""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist


def start():
    if "WORLD_SIZE" not in os.environ:
        return torch.device("cuda", 0)
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    return torch.device("cuda", local)


def stop():
    if dist.is_initialized():
        dist.destroy_process_group()


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def size():
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main():
    return rank() == 0


def total(tensor):
    """The sum over all processes, as a new tensor."""
    tensor = tensor.clone()
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def wait():
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def main_first():
    if not is_main():
        wait()
    yield
    if is_main():
        wait()


def wrap(model, device):
    if not dist.is_initialized():
        return model.to(device)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return torch.nn.parallel.DistributedDataParallel(model.to(device), device_ids=[device.index])


def unwrap(model):
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def save(state, path):
    if is_main():
        torch.save(state, path)
