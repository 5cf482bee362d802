"""The functions and classes of torch.cuda and torch.accelerator, answered for GPUs that aren't there."""

# ruff: noqa: ARG001, ARG005, B010  the signatures are torch's

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.commands.audit.pretended.current import Device, DeviceOf, Event, Stream, device_index, set_device, use
from lockstep.commands.audit.pretended.state import Pretend

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
    use(pretend)
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
        "device_of": DeviceOf,
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
