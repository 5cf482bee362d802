"""parallel_apply: a thread for each replica, of one Python; an exception in one is raised when all have ended.

Reads:
torch/nn/parallel/parallel_apply.py: parallel_apply
torch/_utils.py: ExceptionWrapper.reraise
"""

import threading
import time

import torch
from torch import nn
from torch.nn.parallel import parallel_apply
from two_cpus import two_cpus


class Python(nn.Module):
    def forward(self, x: torch.Tensor) -> float:
        threads.add(threading.current_thread().name)
        began = time.thread_time()
        sum(range(2_000_000))
        if x.item() < 0:
            raise ValueError("negative")
        return time.thread_time() - began


threads: set[str] = set()
with two_cpus():
    began = time.perf_counter()
    busy = sum(parallel_apply([Python(), Python()], [torch.ones(1)] * 2))
    passed = time.perf_counter() - began
    print("threads:", len(threads), "- cores they kept busy: at most one:", busy / passed < 1.1)
    try:
        parallel_apply([Python(), Python()], [torch.ones(1), -torch.ones(1)], None, [0, 1])
    except ValueError as error:
        print(str(error).splitlines()[0], "...", str(error).splitlines()[-1])
