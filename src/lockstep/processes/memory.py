"""The memory of host and devices: how much a process has held, what is free, what becomes of what it frees."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterable

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h
_OWN_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> bool:
    """Have glibc's malloc keep what this process frees, for the next step; False where that is not in its hands.

    By default an activation of more than 32 MB is mapped, faulted in page by page, zeroed and unmapped again in every
    step: on two cores that was a third of the time of a small network at batch 2,000. What is freed stays with the
    process, as on a GPU. Somebody's own settings in the environment are left alone.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in _OWN_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


def free_bytes(device: torch.device) -> int:
    """What an accelerator has left: of its own memory, or of what Metal would give a process at most."""
    if device.type == "mps":  # torch.accelerator's get_memory_info raises there
        metal = torch.get_device_module(device)
        return int(metal.recommended_max_memory() - metal.driver_allocated_memory())
    return torch.accelerator.get_memory_info(device)[0]


def peaks_gib(devices: Iterable[torch.device]) -> list[float]:
    """`peak_gib` of each of the devices that this process drives, in their order."""
    return [round(peak_gib(device), 3) for device in devices]


def peak_gib(device: torch.device) -> float:
    """The most memory that this process has held at once: of the device, or resident on the host for a CPU."""
    if device.type not in ("cpu", "mps"):
        return torch.accelerator.max_memory_allocated(device) / 2**30
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**30 if sys.platform == "darwin" else most / 2**20  # bytes there, KiB elsewhere
