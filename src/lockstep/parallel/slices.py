"""Several slices of a step at once, each in a thread of its own with one intra-op thread.

A kernel rounds by the number of threads that share its sums. So in exact mode every kernel has one, and a process with
several cores takes as many slices at once, each through a replica of the model: a deep copy whose parameters share the
master's storage and have gradients of their own. (Swapping a module's parameters for a call, as torch.func does, would
be seen by the other threads.)

What a thread can't have of its own is a random generator: torch's, numpy's and Python's are one for the process. A
model that draws from them takes one slice after the other.
"""

import contextvars
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from lockstep.parallel.hidden_state import HiddenState
from lockstep.parallel.module_state import deep_copy

_T = TypeVar("_T")
_PLAIN = (bool, int, float, str, bytes, type(None))


class Replicas:
    """A model and up to `most - 1` copies of it, made when they are first needed.

    `modules(n)` brings n of them up to date, the master first. `reason` says why there can't be more than one.
    """

    def __init__(self, master: nn.Module, most: int, made: Callable[[nn.Module], None]) -> None:
        """`made` is called with each module, the master too, before it first computes."""
        self.master, self.most, self.made = master, most, made
        self.reason = ""
        self.copies: list[nn.Module] = []
        self.looks: list[Any] = []
        # the setting holds for the thread that makes it: a new one would begin with a thread for each core
        self.pool = ThreadPoolExecutor(max(1, most - 1), "slices", initializer=torch.set_num_threads, initargs=(1,))
        made(master)

    def alone(self, reason: str) -> None:
        """Take one slice after the other from now on."""
        self.most, self.reason, self.copies = 1, reason, []

    def modules(self, count: int) -> list[nn.Module]:
        """At most `count` modules that compute the same, each for one thread at a time."""
        count = min(count, self.most)
        if count > 1:
            looks = _looks(self.master)
            if self.copies and looks != self.looks:  # an attribute was changed: a schedule of drop path, say
                self.copies = []
            self.looks = looks
            try:
                while len(self.copies) < count - 1:
                    self.copies.append(_replica(self.master))
                    self.made(self.copies[-1])
            except Exception as error:
                self.alone(f"the model can't be copied ({type(error).__name__}: {str(error).splitlines()[0]})")
                return [self.master]
            for each in self.copies:
                _follow(self.master, each)
        return [self.master, *self.copies[: count - 1]]

    def run(self, jobs: int, work: Callable[[nn.Module, int], _T]) -> list[_T]:
        """`work(module, i)` for each of so many jobs; a module takes one at a time.

        The first thread is the caller's. An error in any thread ends all of them before it is raised here.
        """
        modules, results = self.modules(jobs), dict[int, _T]()
        waiting, lock, failures = iter(range(jobs)), threading.Lock(), list[tuple[int, BaseException]]()
        grad = torch.is_grad_enabled()

        def take_turns(module: nn.Module) -> None:
            while True:
                with lock:
                    i = None if failures else next(waiting, None)
                if i is None:
                    return
                try:
                    with torch.set_grad_enabled(grad):
                        results[i] = work(module, i)
                except BaseException as error:
                    failures.append((i, error))

        others = [self.pool.submit(contextvars.copy_context().run, take_turns, module) for module in modules[1:]]
        take_turns(modules[0])
        for other in others:
            other.result()
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1]
        return [results[i] for i in range(jobs)]


def _replica(master: nn.Module) -> nn.Module:
    if any(module._compiled_call_impl is not None for module in master.modules()):
        raise ValueError("it is compiled")
    memo: dict[int, Any] = {}
    for p in master.parameters():
        memo[id(p)] = shared = nn.Parameter(p.data, p.requires_grad)
        shared.__dict__.update(p.__dict__)
    made = deep_copy(master, memo)
    if HiddenState({"": made}).reaches([*master.modules(), *master.parameters(), *master.buffers()]):
        raise ValueError("a function in it holds a part of the model, which its copy would compute with")
    return made


def _follow(master: nn.Module, replica: nn.Module) -> None:
    """What may have changed since the copy was made: modes, storages, what is trained."""
    for ours, its in zip(master.modules(), replica.modules(), strict=True):
        its.training = ours.training
    for p, shared in zip(master.parameters(), replica.parameters(), strict=True):
        if shared.data_ptr() != p.data_ptr():
            shared.data = p.data
        shared.requires_grad_(p.requires_grad)


def _looks(module: nn.Module) -> list[Any]:
    """The plain attributes of all modules, and how many hooks they have."""
    return [
        [
            (name, value) if isinstance(value, _PLAIN) else (name, len(value))
            for name, value in vars(each).items()
            if isinstance(value, _PLAIN) or name.endswith("_hooks")
            if name != "training"
        ]
        for each in module.modules()
    ]


def generators() -> tuple[Any, ...]:
    """The states of the three generators that all threads share, to be compared."""
    state = np.random.get_state()
    return bytes(torch.get_rng_state().numpy()), state[1].tobytes(), state[2:], random.getstate()  # type: ignore
