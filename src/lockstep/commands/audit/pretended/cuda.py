"""The pretended GPUs of this process, and torch.cuda and torch.accelerator, answered for them."""

# ruff: noqa: ARG001, ARG005, B010, E731  the signatures are torch's

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

Emit = Callable[..., None]  # emit(event, **fields)


@dataclass
class Pretend:
    """`devices` GPUs; an event `device` for each index that this process uses, once for each way of saying it."""

    devices: int
    emit: Emit
    reported: set[tuple[int, str]] = field(default_factory=set)
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

        With `how`, an event says that this process uses it.

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
        if how and (asked, how) not in self.reported and threading.current_thread() is threading.main_thread():
            self.reported.add((asked, how))
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


_pretend: Pretend | None = None


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
        self.device, self.priority = torch.device("cuda", device_index(device)), priority
        self.device_index, self.stream_id, self.cuda_stream = self.device.index, 0, 0

    wait_stream = wait_event = synchronize = __exit__ = lambda self, *args: None
    query = lambda self: True
    is_capturing = lambda self: False

    def record_event(self, event: Any = None) -> Any:
        """An event that is over."""
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> "Stream":
        return self


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

    wait = synchronize = lambda self, *args: None
    query = lambda self: True


NAME = "Pretended GPU (this CPU)"
_NOTHING = (
    *("init", "_lazy_init", "synchronize", "empty_cache", "ipc_collect", "set_stream", "set_sync_debug_mode"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
)
_ZERO = ("utilization", "temperature", "power_draw", "clock_rate", "memory_usage", "device_memory_used")
_SHARED = (  # what torch.accelerator has by the same name
    *("is_available", "device_count", "synchronize", "current_stream", "set_stream", "empty_cache", "memory_stats"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats"),
)
MEMORY = 16 * 2**30  # bytes that a GPU says to have, all of them free


def _properties(device: Any = None) -> Any:
    device_index(device)
    return SimpleNamespace(
        name=NAME, major=8, minor=0, total_memory=MEMORY, multi_processor_count=1, is_integrated=False, uuid="0",
        warp_size=32, max_threads_per_multi_processor=2048, gcnArchName="", regs_per_multiprocessor=65536,
    )  # fmt: skip


def _stream(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


def _no_graphs(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("CUDA graphs can't be pretended: lockstep audit runs GPU scripts on the CPU, call by call")


def install(pretend: Pretend) -> None:
    """Put the answers in torch.cuda's and torch.accelerator's places."""
    global _pretend
    _pretend = pretend
    answers = _devices(pretend) | _random(pretend)
    for name in ("allocated", "reserved", "cached"):
        answers |= {f"memory_{name}": _zero, f"max_memory_{name}": _zero, f"reset_max_memory_{name}": _nothing}
    answers |= dict.fromkeys(_ZERO, _zero) | dict.fromkeys(_NOTHING, _nothing)
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        for part in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
            if hasattr(part, name) and name != "device":
                setattr(part, name, answer)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _zero)
    _accelerator(pretend, answers)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _random(pretend: Pretend) -> dict[str, Any]:
    """Seeds and states of each GPU."""

    def seed_one(seed: int) -> None:
        pretend.random[pretend.current] = torch.Generator().manual_seed(int(seed)).get_state()

    def seed_all(seed: int) -> None:
        state = torch.Generator().manual_seed(int(seed)).get_state()
        for index in range(pretend.devices):
            pretend.random[index] = state.clone()

    def set_states(states: Iterable[Any]) -> None:
        for index, state in enumerate(states):
            pretend.random[index] = state.cpu().clone()

    def set_state(state: Any, device: Any = "cuda") -> None:
        pretend.random[device_index(device)] = state.cpu().clone()

    return {
        "manual_seed": seed_one,
        "manual_seed_all": seed_all,
        "seed": lambda: seed_one(torch.Generator().seed()),
        "seed_all": lambda: seed_all(torch.Generator().seed()),
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device="cuda": pretend.random_state(device_index(device)).clone(),
        "get_rng_state_all": lambda: [pretend.random_state(index).clone() for index in range(pretend.visible)],
        "set_rng_state": set_state,
        "set_rng_state_all": set_states,
    }


def _devices(pretend: Pretend) -> dict[str, Any]:
    """Devices, streams and memory."""
    return {
        "is_available": lambda: pretend.visible > 0,
        "device_count": lambda: pretend.visible,
        "current_device": lambda: device_index(),
        "set_device": set_device,
        "device": Device,
        "device_of": lambda tensor: Device(tensor.get_device() if tensor.is_cuda else -1),
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": _properties,
        "get_arch_list": lambda: ["sm_80"],
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda device, peer: True,
        "current_stream": lambda device=None: Stream(device),
        "default_stream": lambda device=None: Stream(device),
        "stream": _stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": _no_graphs,
        "graph": _no_graphs,
        "make_graphed_callables": _no_graphs,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_summary": lambda device=None, abbreviated=False: "no memory of a GPU is used",
        "memory_stats": lambda device=None: {},
    }


def _accelerator(pretend: Pretend, answers: dict[str, Any]) -> None:
    """The same for torch.accelerator, and torch's own Stream and Event where they are asked for a GPU."""
    for name in _SHARED:
        setattr(torch.accelerator, name, answers[name])
    more: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: pretend.current,
        "current_device_idx": lambda: pretend.current,
        "set_device_index": set_device,
        "set_device_idx": set_device,
        "device_index": Device,
        "get_memory_info": answers["mem_get_info"],
    }
    for name, answer in more.items():
        setattr(torch.accelerator, name, answer)
    setattr(torch, "Stream", Stream)
    setattr(torch, "Event", Event)
