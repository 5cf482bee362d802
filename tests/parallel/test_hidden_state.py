"""What a model keeps beside its parameters is found, put back, and seen to have moved, wherever it lies."""

import array
import functools
import itertools
import queue
import threading
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.parallel.hidden_state import HiddenState, differing


@dataclass(slots=True)
class Slots:
    n: int = 0


class MoreSlots(Slots):
    __slots__ = "more"

    def __init__(self) -> None:
        super().__init__()
        self.more = [0]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Frozen:
    numbers: list[int]
    __private: int = 0


class PlainObject:
    n = 0


def bump(holder: Any, key: Any) -> float:
    """Adds one where `key` says; what it comes to."""
    if hasattr(holder, str(key)):
        setattr(holder, key, getattr(holder, key) + 1)
        return float(getattr(holder, key))
    holder[key] += 1
    return float(holder[key])


@torch.no_grad()
def shifted(holder: Any) -> float:
    for value in holder.values() if isinstance(holder, dict) else holder:
        for p in value.parameters() if isinstance(value, nn.Module) else [value]:
            p.add_(1)
    return float(p.flatten()[0])


def trained(holder: tuple[nn.Parameter, torch.optim.Optimizer]) -> float:
    p, optimizer = holder
    p.grad = torch.ones_like(p)
    optimizer.step()
    return float(p.detach())


def with_optimizer(kind: Callable[..., torch.optim.Optimizer], **more: float) -> tuple[Any, torch.optim.Optimizer]:
    return (p := nn.Parameter(torch.zeros(1))), kind([p], lr=0.5, **more)


def scaled(holder: torch.amp.GradScaler) -> float:
    (p, optimizer), scale = with_optimizer(torch.optim.SGD), holder.get_scale()
    holder.scale(p.sum()).backward()
    holder.step(optimizer)
    holder.update()
    return scale


def numbers() -> "queue.Queue[int]":
    made = queue.Queue[int]()
    made.put(0)
    return made


def taken(holder: Any) -> float:
    holder.put(held := holder.get() + 1)
    return float(held)


def local() -> threading.local:
    made = threading.local()
    made.n = 0
    return made


# of each: what makes it, and what moves it and returns what it came to
HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a list": (lambda: [0], lambda h: bump(h, 0)),
    "a dict in a tuple": (lambda: ({"n": 0},), lambda h: bump(h[0], "n")),
    "a Counter": (Counter, lambda h: bump(h, 0)),
    "a defaultdict": (lambda: defaultdict(int), lambda h: bump(h, 0)),
    "an OrderedDict": (lambda: OrderedDict({0: 0}), lambda h: bump(h, 0)),
    "a UserDict": (lambda: UserDict({0: 0}), lambda h: bump(h, 0)),
    "a WeakKeyDictionary": (lambda: WeakKeyDictionary({PlainObject: 0}), lambda h: bump(h, PlainObject)),
    "a scaler of gradients": (lambda: torch.amp.GradScaler("cpu", growth_interval=1), scaled),
    "a deque": (lambda: deque([0], 3), lambda h: h.append(h[-1] + 1) or float(h[-1])),
    "a set": (set, lambda h: h.add(len(h)) or float(len(h))),
    "a bytearray": (lambda: bytearray(1), lambda h: bump(h, 0)),
    "an array": (lambda: array.array("d", [0]), lambda h: bump(h, 0)),
    "an array of numpy": (lambda: np.zeros(1), lambda h: bump(h, 0)),
    "an object": (PlainObject, lambda h: bump(h, "n")),
    "a class": (lambda: type("Kind", (), {"n": 0}), lambda h: bump(h, "n")),
    "slots": (Slots, lambda h: bump(h, "n")),
    "a list in frozen slots": (lambda: Frozen([0]), lambda h: bump(h.numbers, 0)),
    "a list in slots": (MoreSlots, lambda h: bump(h.more, 0) + bump(h, "n")),
    "a namespace": (lambda: types.SimpleNamespace(n=0), lambda h: bump(h, "n")),
    "a thread's own": (local, lambda h: bump(h, "n")),
    "a queue": (numbers, taken),
    "a partial": (lambda: functools.partial(dict, n=[0], m=0), lambda h: bump(h.keywords["n"], 0) + h.keywords["m"]),
    "a partial's own words": (lambda: functools.partial(dict, n=0), lambda h: bump(h.keywords, "n")),
    "a module in a list": (lambda: [nn.Linear(1, 1, dtype=torch.float64)], shifted),
    "a frozen module in a dict": (lambda: {"t": nn.Linear(1, 1).requires_grad_(False)}, shifted),
    "a parameter in a list": (lambda: [nn.Parameter(torch.zeros(1))], shifted),
    "SGD of another parameter": (lambda: with_optimizer(torch.optim.SGD, momentum=0.9), trained),
    "Adam of another parameter": (lambda: with_optimizer(torch.optim.Adam), trained),
    "torch's generator": (torch.Generator, lambda h: float(torch.rand((), generator=h))),
    "numpy's generator": (lambda: np.random.default_rng(0), lambda h: h.random()),
    "a count": (itertools.count, lambda h: float(next(h))),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(2, 2), held


def in_attribute(held: Any) -> tuple[nn.Module, Callable[[], Any]]:
    model = Model(held)
    return model, lambda: model.held


def in_closure(held: Any) -> tuple[nn.Module, Callable[[], Any]]:
    model = Model(None)

    def hook(*_: Any) -> Any:
        return held

    model.register_forward_hook(hook)
    return model, hook


@pytest.mark.parametrize("place", [in_attribute, in_closure])
@pytest.mark.parametrize("kind", HOLDERS)
def test_what_has_moved_is_seen_and_put_back(kind: str, place: Callable[[Any], Any]) -> None:
    if (kind, place) == ("a count", in_closure):
        pytest.skip("an iterator can't be moved back, only replaced")
    make, move = HOLDERS[kind]
    model, held = place(make())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        state = HiddenState({"": model})
        assert differing(state, HiddenState({"": model})) == []
        came_to = [move(held()) for _ in range(3)]
        assert differing(state, HiddenState({"": model})) != []
        state.restore()
        assert differing(state, HiddenState({"": model})) == []
        assert [move(held()) for _ in range(3)] == came_to
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_of_the_model_itself_are_not_copied() -> None:
    model = Model([nn.Linear(2, 2)])
    model.held += [model.layer, torch.optim.Adam(model.layer.parameters())]
    names = [name for name, value in HiddenState({"": model}).values.items() if isinstance(value, torch.Tensor)]
    assert names == ["held[0].weight", "held[0].bias"]


def test_a_set_that_is_put_back_keeps_its_order() -> None:
    collide = {7, 15}  # the first one's place is the second one's too
    order, state = list(collide), HiddenState({"": {"names": collide}})
    state.restore()
    assert list(collide) == order
    collide.add(3)
    state.restore()
    assert collide == {7, 15}


def test_what_a_list_no_longer_has_is_not_there() -> None:
    model = Model([1.0, 2.0])
    state = HiddenState({"": model})
    assert state.give("held[1]", 3.0)
    assert state.current("held[1]") == 3.0
    model.held.pop()
    assert not state.give("held[1]", 4.0)
    assert [state.current(f"held[{i}]", "gone") for i in (0, 1, 5)] == [1.0, "gone", "gone"]
