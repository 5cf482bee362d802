"""Tensors in a few numbers, by which records of several runs are compared."""

import hashlib
from collections.abc import Iterable

import torch


def sums(tensor: torch.Tensor) -> list[float]:
    """The sum and the norm of all values, in float64."""
    wide = tensor.detach().to(torch.float64)
    return [float(wide.sum()), float(wide.norm())]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of all their bytes."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]
