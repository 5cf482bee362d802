"""The pretended GPUs of this process: how many, which is current, their random states, and what used which."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

Emit = Callable[..., None]  # emit(event, **fields)


@dataclass
class Pretend:
    """`devices` GPUs; an event `device` for each index that this process uses, once for each way of saying it."""

    devices: int
    emit: Emit
    told: set[tuple[int, str]] = field(default_factory=set)
    random: dict[int, torch.Tensor] = field(default_factory=dict)
    local: threading.local = field(default_factory=threading.local)

    @property
    def current(self) -> int:
        """The current GPU of this thread, as CUDA has it: 0 until it is set."""
        return getattr(self.local, "current", 0)

    @current.setter
    def current(self, index: int) -> None:
        self.local.current = index

    @property
    def visible(self) -> int:
        """How many GPUs the script sees, after CUDA_VISIBLE_DEVICES."""
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        return self.devices if listed is None else min(self.devices, len([n for n in listed.split(",") if n.strip()]))

    def index(self, device: Any, how: str = "") -> int | None:
        """The index of a GPU that a script names ("cuda", "cuda:1", 1, torch.device); None for what is no GPU.

        With `how`, that this process uses it is told.

        Raises:
            RuntimeError: as CUDA does, for a GPU that isn't there.
        """
        if device is None or isinstance(device, bool):
            return None
        if isinstance(device, int):
            named, asked = torch.device("cuda"), device
        else:
            named = torch.device(device)
            asked = self.current if named.index is None else named.index
        if named.type != "cuda":
            return None
        if not 0 <= asked < self.visible:
            raise RuntimeError(f"CUDA error: invalid device ordinal (cuda:{asked} of {self.visible} pretended GPUs)")
        if how and (asked, how) not in self.told and threading.current_thread() is threading.main_thread():
            self.told.add((asked, how))
            self.emit("device", index=asked, how=how, devices=self.visible)
        return asked

    @contextmanager
    def drawing_on(self, index: int) -> Iterator[None]:
        """Draw from a GPU's random state in place of the CPU's; 20 us for the exchange."""
        kept = torch.get_rng_state()
        torch.set_rng_state(self.random_state(index))
        try:
            yield
        finally:
            self.random[index] = torch.get_rng_state()
            torch.set_rng_state(kept)

    def random_state(self, index: int) -> torch.Tensor:
        """A GPU's random state: unseeded, it begins at torch's initial seed, like the CPU's."""
        if index not in self.random:
            self.random[index] = torch.Generator().manual_seed(torch.default_generator.initial_seed()).get_state()
        return self.random[index]
