"""What a model's code may move beside parameters: found, kept, put back, compared.

Buffers, attributes, what is in lists, dicts and objects, generators, variables of closures, class attributes and the
globals that the code names; modules, parameters and optimizers that are no part of the model. Not reached: what C++ or
another library's objects hold, generators and most iterators, files, other processes.
"""

import dis
import hashlib
import inspect
import itertools
import queue
import random
import sys
import threading
import types
import warnings
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from copy import deepcopy
from enum import Enum
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, torch.Size, Enum)
_PACKED = (bytearray, array)  # of numbers alone
_CONTAINERS = (list, dict, set, deque, *_PACKED)
# Python's own, with attributes
_HOLDERS = (types.SimpleNamespace, threading.local, queue.Queue, UserDict, UserList, WeakKeyDictionary)
_ITERATORS = (itertools.count, itertools.cycle, *map(type, (iter([]), iter(()), iter(range(0)), iter(""))))
_LIBRARIES = {*sys.stdlib_module_names, "torch", "torchvision", "timm", "numpy", "lockstep"} - {"__main__"}
# of libraries, whose state a hook or forward may move all the same
_MOVED = ("torch.optim.lr_scheduler", "timm.scheduler", "torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler")
_LARGE = 1 << 26  # bytes of a tensor that is no buffer: it is taken for data
_LONG = 256  # elements of a container that are looked at one by one
_OTHERS = {"_parameters", "_modules", "_non_persistent_buffers_set"}  # of a module; FSDP swaps its parameters there
LENGTH = "the length of "  # before the name of a list or deque whose elements have names of their own
_GENERATORS = ("torch's generator", "numpy's generator", "Python's generator")
_MISSING = object()


def _is_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _LIBRARIES


class HiddenState:
    """The state that some objects reach, as it is now.

    Args:
        roots: modules and functions, by name.
        devices: whose generators belong to it, beside those of torch, numpy and Python; None: no generator does.
    """

    def __init__(self, roots: dict[str, Any], devices: Iterable[torch.device] | None = None) -> None:
        self.values: dict[str, Any] = {}  # plain values, and copies of tensors and states of generators, by name
        self.generators: set[str] = set()  # the names of those of them that are states of generators
        self.trained: dict[str, Tensor] = {}  # leaves that require a gradient, no copies, by name
        self._kept: dict[Any, tuple[Any, Callable[[], object]]] = {}  # id -> what it is of, and what puts it back
        self.containers: dict[str, tuple[Any, Any]] = {}  # name -> a list, dict, ... itself, and its shape by now
        self._holders: dict[str, dict[str, Any]] = {}  # name -> the attributes of what has it
        self._functions: dict[str, int] = {}  # how many of a name there are, as one makes a hook for each layer
        self._setters: dict[str, Callable[[Any], object]] = {}  # name -> gives it another value
        modules = [root for root in roots.values() if isinstance(root, nn.Module)]
        # the parameters of these, which are not copied; None: there is no module, and none is, as of an optimizer
        self.own = {id(p) for root in modules for p in root.parameters()} if modules else None
        for name, root in roots.items():
            self._visit(root, name)
        if devices is not None:
            self._keep_generators(devices)

    def give(self, name: str, value: Any) -> bool:
        """Give what has this name another value, of the kind that `values` holds; False where there is nothing."""
        if name in self.containers and _fill(self.containers[name][0], value):
            return True
        place = self._setters.get(name)
        path, _, attribute = name.rpartition(".")
        if place is None and path in self._holders and attribute.isidentifier():
            place = partial(self._holders[path].__setitem__, attribute)  # what the first pass would make
        if place is None:
            return False
        try:
            place(value)
        except IndexError:  # of a list that has become shorter
            return False
        return True

    def current(self, name: str, default: Any = None) -> Any:
        """The value that what has this name has by now, of an attribute or a variable; `default` where it is gone."""
        place: Any = self._setters.get(name)
        try:
            return getattr(*place.args) if place.func is setattr else place.func.__self__[place.args[0]]
        except (AttributeError, LookupError):
            return default

    def reaches(self, objects: Iterable[Any]) -> bool:
        """Whether some of these modules or tensors were found; a module's own parameters are not looked for."""
        return any(id(each) in self._kept for each in objects)

    def restore(self) -> None:
        """Put everything back where it was."""
        with torch.no_grad():
            for _, put_back in self._kept.values():
                put_back()

    def _keep_generators(self, devices: Iterable[torch.device]) -> None:
        states = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
        setters: Any = torch.set_rng_state, np.random.set_state, random.setstate
        for name, state, put_back in zip(_GENERATORS, states, setters, strict=True):
            self._state(name, state, put_back)
        for device in set(devices):
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
                put_back = partial(module.set_rng_state, device=device)
                self._state(f"the generator of {device}", module.get_rng_state(device), put_back)

    def _state(self, name: str, state: Any, put_back: Callable[[Any], object], holder: Any = None) -> None:
        self.values[name], self._setters[name] = state, put_back
        self.generators.add(name)
        self._kept[id(holder) if holder is not None else id(state)] = holder, partial(put_back, state)

    def _visit(self, value: Any, name: str, place: Callable[[Any], object] = lambda _: None) -> None:
        """`place` puts another value where this one is."""
        self._setters.setdefault(name, place)
        if isinstance(value, _PLAIN):
            self.values[name] = value
        elif id(value) not in self._kept:
            for kinds, visit in _VISITS:
                if isinstance(value, kinds):
                    visit(self, value, name)
                    return
            own = not _is_library(type(value).__module__)
            library = isinstance(value, _HOLDERS) or type(value).__module__.startswith(_MOVED)
            if hasattr(value, "__dict__") and (own or library):
                self._keep_dict(vars(value), name, value)
            if own:
                self._keep_slots(value, name)
                self._visit(type(value), type(value).__name__)

    def _visit_tensor(self, value: Tensor, name: str, limit: int = _LARGE) -> None:
        if value.requires_grad and value.is_leaf:
            self.trained[name] = value
        own = isinstance(value, nn.Parameter) and (self.own is None or id(value) in self.own)
        if own or hasattr(value, "full_tensor") or value.device.type == "meta":
            self._kept.setdefault(id(value), (value, _nothing))
            return
        if value.layout is torch.strided and value.nbytes <= limit:
            copy = self.values[name] = value.detach().clone()
            self._setters[name] = partial(_set_tensor, value)
            self._kept[id(value)] = value, partial(_set_tensor, value, copy)

    def keep_parameter(self, name: str, p: nn.Parameter) -> None:
        """The values of a parameter, wherever its `data` is by then."""
        copy = self.values[name] = p.detach().clone()
        self._setters[name] = partial(_set_tensor, p)
        self._kept[id(p), "values"] = p, partial(_set_tensor, p, copy)

    def _visit_array(self, value: np.ndarray, name: str) -> None:
        if value.nbytes <= _LARGE and value.dtype != object:
            copy = self.values[name] = value.copy()
            self._setters[name] = partial(_set_array, value)
            self._kept[id(value)] = value, partial(_set_array, value, copy)

    def _visit_container(self, value: Any, name: str) -> None:
        if isinstance(value, dict):
            self._keep_dict(value, name, value)
            return
        copy = list(value)
        self.containers[name] = value, len(copy)
        self._kept[id(value)] = value, partial(_set_container, value, copy)
        if len(copy) > _LONG or isinstance(value, (set, *_PACKED)):
            self.values[name] = (set if isinstance(value, set) else tuple)(v for v in copy if isinstance(v, _PLAIN))
            return
        self.values[LENGTH + name] = len(copy)
        for i, element in enumerate(copy):
            self._visit(element, f"{name}[{i}]", partial(value.__setitem__, i))

    def _visit_tuple(self, value: tuple[Any, ...], name: str) -> None:
        self._kept[id(value)] = value, _nothing
        self.containers[name] = value, len(value)
        for i, element in enumerate(value[:_LONG]):
            self._visit(element, f"{name}[{i}]")

    def _keep_dict(self, held: dict[Any, Any], name: str, holder: Any, keys: set[Any] | None = None) -> None:
        """Entries of a dict: all of it, or some keys. An attribute's name follows its holder's after a dot."""
        items = dict(held) if keys is None else {key: held[key] for key in keys if key in held}
        self._kept[id(holder)] = (holder, held), partial(_set_dict, held, items, keys is None)
        inner = isinstance(holder, dict)
        if inner:
            self.containers[name] = held, [_called(key, i) for i, key in enumerate(items)]
        else:
            self._holders[name] = held
        for i, (key, value) in enumerate([*items.items()][: None if keys is not None else 4 * _LONG]):
            full = f"{name}[{_called(key, i)}]" if inner else f"{name}.{key}".lstrip(".")
            self._visit(value, full, partial(held.__setitem__, key))

    def _keep_slots(self, value: Any, name: str) -> None:
        self._kept.setdefault(id(value), (value, _nothing))
        for kind in (each for each in type(value).__mro__ if "__slots__" in vars(each)):
            for key, slot in vars(kind).items():
                if isinstance(slot, types.MemberDescriptorType) and hasattr(value, key):
                    held = getattr(value, key)
                    self._kept[id(value), key] = value, partial(slot.__set__, value, held)  # of a frozen one, too
                    self._visit(held, f"{name}.{key}", partial(setattr, value, key))

    def _visit_script(self, module: torch.jit.ScriptModule, name: str) -> None:
        """Of what torch.jit compiled: tensors stay in their places, which are C++'s."""
        self._kept[id(module)] = module, _nothing
        for key, buffer in module.named_buffers(name):
            self._visit_tensor(buffer, key, sys.maxsize)
        for p in module.parameters():
            self._kept[id(p), "trained"] = p, partial(p.requires_grad_, p.requires_grad)

    def _visit_module(self, module: nn.Module, name: str) -> None:
        held = vars(module)
        self._holders[name] = held
        items = {key: value for key, value in held.items() if key not in _OTHERS}
        self._kept[id(module)] = module, partial(_set_dict, held, items, True, _OTHERS)
        prefix = f"{name}." if name else ""
        buffers = module._buffers
        self._kept[id(buffers)] = buffers, partial(_set_dict, buffers, dict(buffers), True)
        for key, buffer in buffers.items():
            if buffer is not None and id(buffer) not in self._kept:
                self._visit_tensor(buffer, prefix + key, sys.maxsize)
        for key, value in items.items():
            if isinstance(value, dict) and not value:  # most of a module's
                self._kept.setdefault(id(value), (value, value.clear))
            elif key.endswith("_hooks") and isinstance(value, dict):
                self._keep_dict(value, f"hooks of {name or 'the model'}", value)
            elif key != "_buffers":
                self._visit(value, prefix + key, partial(held.__setitem__, key))
        for key, p in module.named_parameters(recurse=False):
            self._kept[id(p), "trained"] = p, partial(p.requires_grad_, p.requires_grad)
            if p.requires_grad:
                self.trained[prefix + key] = p
            if self.own is not None and id(p) not in self.own:
                self._visit(p, prefix + key)
        self._visit(type(module), type(module).__name__)
        for key, child in module.named_children():
            self._visit(child, prefix + key)

    def _visit_class(self, kind: type, name: str) -> None:
        self._kept[id(kind)] = kind, _nothing
        if _is_library(kind.__module__):
            for base in kind.__mro__[1:-1]:
                self._visit(base, base.__name__)
            return
        for key, value in [*vars(kind).items()]:
            if isinstance(value, _PLAIN) and not key.startswith("__"):
                self._kept[id(kind), key] = kind, partial(_set_attribute, kind, key, value)
                self._visit(value, f"{name}.{key}", partial(setattr, kind, key))
            elif not key.startswith("__") or isinstance(value, types.FunctionType):
                self._visit(value, f"{name}.{key}")
        for base in kind.__mro__[1:-1]:
            self._visit(base, base.__name__)

    def _visit_function(self, function: types.FunctionType, _: str) -> None:
        self._kept[id(function)] = function, _nothing
        if _is_library(function.__module__) and function.__closure__ is None:
            return
        name = function.__qualname__
        number = self._functions[name] = self._functions.get(name, 0) + 1
        name += f" ({number})" * (number > 1)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) in self._kept or variable == "__class__":
                continue
            value = _content(cell)
            if value is not _MISSING:
                self._kept[id(cell)] = cell, partial(setattr, cell, "cell_contents", value)
                place = partial(setattr, cell, "cell_contents")
                self._visit(value, f"{variable} of {name}", place)
        if _is_library(function.__module__):
            return
        for i, default in enumerate([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]):
            self._visit(default, f"default {i} of {name}")
        if vars(function):
            self._keep_dict(vars(function), name, vars(function))
        self._visit_named(function.__globals__, _global_names(function.__code__), function.__module__)

    def _visit_named(self, variables: dict[str, Any], names: Set[str], module: str) -> None:
        for key in names & variables.keys():
            value = variables[key]
            if isinstance(value, types.ModuleType):
                if not _is_library(value.__name__) and id(value) not in self._kept:
                    self._kept[id(value)] = value, _nothing
                    self._visit_named(vars(value), set(vars(value)), value.__name__)
                continue
            if (id(variables), key) not in self._kept:
                place = partial(variables.__setitem__, key)
                self._kept[id(variables), key] = variables, partial(place, value)
                self._visit(value, f"{key} of {module}", place)


@cache
def _global_names(code: types.CodeType) -> frozenset[str]:
    """The global variables that code uses; `co_names` would have its attributes too."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname.endswith(("_GLOBAL", "_NAME"))}
    return frozenset(found).union(*(_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _nothing() -> None: ...


def _called(key: Any, position: int) -> str:
    """What an entry of a dict is called; a key that is no plain value, as a parameter, looks otherwise each time."""
    return repr(key) if isinstance(key, _PLAIN) else f"{type(key).__name__} {position}"


def _fill(container: Any, value: Any) -> bool:
    """Put the elements of `value` into a container of its kind, which others may hold too; False for another kind."""
    match container, value:
        case dict(), dict():
            _set_dict(container, value, True)
        case (set(), set()) | (list() | deque() | bytearray() | array(), list() | tuple() | deque()):
            _set_container(container, [*value])
        case _:
            return False
    return True


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return _MISSING


def _set_attribute(kind: type, key: str, value: Any) -> None:
    if vars(kind).get(key, _MISSING) is not value:
        setattr(kind, key, value)


def _set_tensor(tensor: Tensor, copy: Tensor) -> None:
    if (tensor.shape, tensor.dtype) != (copy.shape, copy.dtype):
        tensor.data = copy.clone()
    else:
        tensor.data.copy_(copy)  # by .data: what autograd has kept of it is of passes that are over


def _set_array(array: np.ndarray, copy: np.ndarray) -> None:
    if array.flags.writeable:
        array[...] = copy


def _set_container(container: Any, copy: list[Any]) -> None:
    if isinstance(container, list | bytearray):
        container[:] = copy
    elif isinstance(container, array):
        container[:] = array(container.typecode, copy)
    elif not isinstance(container, set) or container != set(copy):  # filled anew it may have another order
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(copy)


def _set_dict(held: dict[Any, Any], items: dict[Any, Any], whole: bool, others: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    if whole:
        for key in [key for key in held if key not in items and key not in others]:
            del held[key]
    for key, value in items.items():
        if held.get(key, _MISSING) is not value:
            held[key] = value


def _visit_iterator(state: HiddenState, value: Any, name: str) -> None:
    """An iterator can't be moved back: where it stands as itself, a copy takes its place."""
    place = state._setters[name]
    with suppress(Exception), warnings.catch_warnings():  # Python 3.14 copies none of itertools', 3.12 warns of that
        warnings.simplefilter("ignore", DeprecationWarning)
        copy = deepcopy(value)
        state._kept[id(value)] = value, lambda: place(deepcopy(copy))
        # what is to come says where it stands; in bytes, which no checkpoint carries: nothing can be put there from it
        state.values[name] = str([*itertools.islice(deepcopy(copy), _LONG)]).encode()


def _visit_generator(state: HiddenState, value: Any, name: str) -> None:
    if isinstance(value, torch.Generator):
        state._state(name, value.get_state(), value.set_state, value)
    elif isinstance(value, random.Random):
        state._state(name, value.getstate(), value.setstate, value)
    elif isinstance(value, np.random.RandomState):
        state._state(name, value.get_state(legacy=False), value.set_state, value)
    else:
        bits = value if isinstance(value, np.random.BitGenerator) else value.bit_generator
        state._state(name, bits.state, partial(setattr, bits, "state"), value)


def _visit_optimizer(state: HiddenState, value: torch.optim.Optimizer, name: str) -> None:
    """What a class of a user's adds to it, and keeps itself; of one that trains none of the model's parameters, all.
    The rest is its state_dict's."""
    trained = {id(p) for group in value.param_groups for p in group["params"]}
    others = state.own is not None and state.own.isdisjoint(trained)
    state._keep_dict(vars(value), name, value, vars(value).keys() - (set() if others else _torchs_own()))
    state._visit(type(value), type(value).__name__)


@cache
def _torchs_own() -> set[str]:
    return {*vars(torch.optim.SGD([torch.zeros(1)]))}


def _visit_parts(parts: Callable[[Any], Iterable[Any]]) -> Callable[[HiddenState, Any, str], None]:
    def visit(state: HiddenState, value: Any, name: str) -> None:
        state._kept[id(value)] = value, _nothing
        for part in parts(value):
            state._visit(part, name)

    return visit


_RANDOM = torch.Generator, random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator


def generators_around(frame: types.FrameType | None) -> dict[str, Any]:
    """The random generators that a function and those which have called it hold, by name."""
    found: dict[str, Any] = {}
    while frame is not None:
        if not _is_library(frame.f_globals.get("__name__")):
            values = {**frame.f_globals, **(variables := frame.f_locals)}
            private = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and sys.getrefcount(variables) == 3
            if private and isinstance(variables, dict):  # Python 3.12 keeps the copy, and so a batch until the next one
                variables.clear()
            values |= {f"self.{name}": value for name, value in getattr(values.get("self"), "__dict__", {}).items()}
            found |= {name: value for name, value in values.items() if isinstance(value, _RANDOM)}
        frame = frame.f_back
    return found


_VISITS: tuple[tuple[Any, Callable[[HiddenState, Any, str], None]], ...] = (
    (Tensor, HiddenState._visit_tensor),
    (torch.jit.ScriptModule, HiddenState._visit_script),
    (nn.Module, HiddenState._visit_module),
    (_CONTAINERS, HiddenState._visit_container),
    (tuple, HiddenState._visit_tuple),
    (np.ndarray, HiddenState._visit_array),
    (_RANDOM, _visit_generator),
    (_ITERATORS, _visit_iterator),
    (types.FunctionType, HiddenState._visit_function),
    (types.MethodType, _visit_parts(lambda method: (method.__func__, method.__self__))),
    (partial, _visit_parts(lambda value: (value.func, *value.args, value.keywords))),
    (torch.optim.Optimizer, _visit_optimizer),
    ((staticmethod, classmethod), _visit_parts(lambda value: (value.__func__,))),
    (property, _visit_parts(lambda value: filter(None, (value.fget, value.fset)))),
    (type, HiddenState._visit_class),
    (types.ModuleType, lambda *_: None),
)


def is_of_the_process(name: str) -> bool:
    """Whether a state's name is that of a generator which the process has, and no model."""
    return name in _GENERATORS or name.startswith("the generator of ")


def differing(a: HiddenState, b: HiddenState) -> list[str]:
    """The names under which two states hold different values, or only one of them any."""
    names = dict.fromkeys([*a.values, *b.values])
    return [name for name in names if not same(a.values.get(name, _MISSING), b.values.get(name, _MISSING))]


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same; NaN is itself here."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        return alike and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        if {int} == {*map(type, a)}:  # a generator's state has hundreds
            return bool(a == b)
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or (
        type(a) is type(b) and not isinstance(a, Tensor | np.ndarray) and bool(a == b or (a != a and b != b))
    )


def digest(value: Any) -> str:
    """A text that two values of a state have in common where they are the same."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        content = value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""
    else:
        content = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()  # processors have instructions for it


@contextmanager
def put_back(roots: dict[str, Any], devices: Iterable[torch.device] | None = None) -> Iterator[HiddenState]:
    """Within, code may move what it likes; afterwards all is as before."""
    state = HiddenState(roots, devices)
    try:
        yield state
    finally:
        state.restore()
