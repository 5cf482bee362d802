"""One CPU as two devices, 0 and 1, for the functions of torch.nn.parallel, which refuse CPU tensors.

Only what touches a device is replaced: the copy of the weights, and the streams and device switches around a thread.
With two GPUs leave `with two_cpus():` out and move the module to the first.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

replicate_py = importlib.import_module("torch.nn.parallel.replicate")


def broadcast(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Tensor]]:
    """What the copies of `tensors` are: device 0 has the tensors' own memory, each further device a copy."""
    first = list(tensors) if detach else [tensor.view_as(tensor) for tensor in tensors]
    return [first, *([tensor.clone() for tensor in tensors] for _ in devices[1:])]


@contextmanager
def two_cpus() -> Iterator[None]:
    accelerator: dict[str, Any] = {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cpu"),
        "current_stream": nullcontext,
        "device_index": nullcontext,
    }
    with (
        patch.object(replicate_py, "_broadcast_coalesced_reshape", broadcast),
        patch.multiple(torch.accelerator, **accelerator),
    ):
        yield
