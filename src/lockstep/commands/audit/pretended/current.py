"""The current GPU of those that are pretended, its stream and its events."""

import time
from typing import Any

import torch

from lockstep.commands.audit.pretended.state import Pretend

_pretend: Pretend | None = None


def use(pretend: Pretend) -> None:
    """From here on these are the GPUs that are pretended."""
    global _pretend
    _pretend = pretend


def device_index(device: Any = None) -> int:
    """A device argument as an index, the current one for None."""
    assert _pretend is not None
    index = _pretend.index("cuda" if device is None else device)
    if index is None:
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return index


class Device:
    """torch.cuda.device(i) and torch.accelerator.device_index(i): another current GPU inside a `with`."""

    def __init__(self, device: Any) -> None:
        self.index = -1 if device is None or (isinstance(device, int) and device < 0) else device_index(device)
        self.before = -1

    def __enter__(self) -> None:
        assert _pretend is not None
        self.before = _pretend.current
        _pretend.current = self.index if self.index >= 0 else self.before

    def __exit__(self, *exc: object) -> None:
        assert _pretend is not None
        _pretend.current = self.before


class DeviceOf(Device):
    """torch.cuda.device_of(tensor)."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.get_device() if tensor.is_cuda else -1)


def set_device(device: Any) -> None:
    """torch.cuda.set_device; a negative index asks for nothing."""
    assert _pretend is not None
    if isinstance(device, int) and device < 0:
        return
    index = _pretend.index(device, "set_device")
    _pretend.current = _pretend.current if index is None else index


class Stream:
    """A stream of work: there is one, and it is always done."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        del kwargs
        self.device, self.priority, self.stream_id, self.cuda_stream = (
            torch.device("cuda", device_index(device)),
            priority,
            0,
            0,
        )
        self.device_index = self.device.index

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for, here and below."""

    def wait_event(self, event: Any) -> None: ...  # noqa: D102

    def synchronize(self) -> None: ...  # noqa: D102

    def query(self) -> bool:
        """Whether its work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is recorded."""
        return False

    def record_event(self, event: Any = None) -> Any:
        """An event that is over."""
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None: ...


class Event:
    """A moment on a stream: the CPU's clock when it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self.moment = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        del stream
        self.moment = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two events."""
        return (end.moment - self.moment) * 1000

    def query(self) -> bool:
        """Whether it is over."""
        return True

    def wait(self, stream: Any = None) -> None: ...  # noqa: D102

    def synchronize(self) -> None: ...  # noqa: D102
