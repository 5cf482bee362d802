# expect: none
import os
import time
from collections import defaultdict

import torch
import torch.distributed as dist


class Meter:
    """A sum and a count, added over ranks when asked for."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total = self.total + value.detach() * n
        self.count += n

    def mean(self, device):
        both = torch.zeros(2, dtype=torch.float64, device=device)
        both[0] += self.total
        both[1] += self.count
        if is_dist():
            dist.barrier()
            dist.all_reduce(both)
        return (both[0] / both[1]).item()


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(Meter)

    def update(self, n=1, **values):
        for name, value in values.items():
            self.meters[name].update(value, n)

    def means(self, device):
        return {name: meter.mean(device) for name, meter in self.meters.items()}

    def log_every(self, iterable, frequency, header):
        start = time.time()
        for i, batch in enumerate(iterable):
            yield batch
            if i % frequency == 0 and is_main_process():
                print(f"{header} [{i}] {time.time() - start:.1f} s")


def is_dist():
    return dist.is_available() and dist.is_initialized()


def is_main_process():
    return not is_dist() or dist.get_rank() == 0


def world_size():
    return dist.get_world_size() if is_dist() else 1


def save_on_master(*args, **kwargs):
    if is_main_process():
        torch.save(*args, **kwargs)


def init_distributed_mode(args):
    args.distributed = "RANK" in os.environ
    args.gpu = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(args.gpu)
    if args.distributed:
        dist.init_process_group("nccl", init_method="env://")
        dist.barrier()
