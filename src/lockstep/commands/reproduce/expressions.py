"""Objects as Python: each by the call that created it. Calls are noted from before the script's first line on."""

import enum
import functools
import inspect
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

# object's id -> itself (so that no other one gets the id), and what its class was called with
_calls: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
_PLAIN = (bool, int, str, bytes, type(None), type(...))


class Unwritable(Exception):
    """An object that no expression is known for; the text says which."""


def note_calls() -> None:
    """From here on, note what modules, data sets and schedulers are created with."""

    def noting(cls: type, *args: Any, **kwargs: Any) -> Any:
        thing: Any = object.__new__(cls)
        _calls[id(thing)] = thing, args, kwargs
        return thing

    for base in (nn.Module, Dataset, LRScheduler):
        base.__new__ = noting  # type: ignore[method-assign]


def schedulers(optimizer: Any) -> list[LRScheduler]:
    """The schedulers of an optimizer, in the order of their creation."""
    every = [value for value, _, _ in _calls.values() if isinstance(value, LRScheduler)]
    return [each for each in every if getattr(each, "optimizer", None) is optimizer]


@dataclass
class Writer:
    """Writes expressions, and notes what they need: modules, names of the script, folders of modules, tensors."""

    home: Path  # the script's folder
    modules: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # that the script's own file defines
    local: bool = False  # modules beside the script are needed
    tensors: dict[str, Tensor] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)  # of data sets
    known: dict[int, str] = field(default_factory=dict)  # objects that have a name where it will stand, by their ids

    def write(self, value: Any, paths: bool = False) -> str:
        """The expression of a value; `paths`: texts that name a file or folder become absolute.

        Raises:
            Unwritable: for what has none, as a lambda or an open file.
        """
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, enum.Enum):
            return f"{self.reference(type(value))}.{value.name}"
        if isinstance(value, str) and paths and value and (value in self.folders or Path(value).exists()):
            return repr(str(Path(value).absolute()))
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, Path):
            self.modules.add("pathlib")
            return f"pathlib.Path({str(value.absolute() if paths and value.exists() else value)!r})"
        if isinstance(value, list | tuple | set | dict | range | slice):
            return self._collection(value, paths)
        if isinstance(value, Tensor | np.ndarray) and not isinstance(value, nn.Parameter):
            return self._tensor(value)
        if isinstance(value, torch.dtype | torch.device):
            self.modules.add("torch")
            return str(value) if isinstance(value, torch.dtype) else f"torch.device({str(value)!r})"
        if isinstance(value, functools.partial):
            self.modules.add("functools")
            return f"functools.partial({self._arguments((value.func, *value.args), value.keywords, paths)})"
        if isinstance(value, type) or inspect.isroutine(value):
            return self.reference(value)
        return self._object(value, paths)

    def _collection(self, value: Any, paths: bool) -> str:
        if isinstance(value, range | slice):
            return repr(value)
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.write(k)}: {self.write(v, paths)}' for k, v in value.items())}}}"
        if len(value) > 64 and all(isinstance(each, int) for each in value):  # as indices of a subset
            return f"{self._tensor(torch.tensor(list(value)))}.tolist()"
        if type(value) not in (list, tuple, set):
            raise Unwritable(f"a {type(value).__name__}")
        items = ", ".join(self.write(each, paths) for each in value)
        if isinstance(value, tuple):
            return f"({items}{',' if len(value) == 1 else ''})"
        return f"[{items}]" if isinstance(value, list) else f"{{{items}}}" if value else "set()"

    def _tensor(self, value: Any) -> str:
        name = f"tensor{len(self.tensors)}"
        self.tensors[name] = torch.as_tensor(value).detach().cpu().contiguous().clone()
        return f'TENSORS["{name}"]' + (".numpy()" if isinstance(value, np.ndarray) else "")

    def _object(self, value: Any, paths: bool) -> str:
        kind, noted = type(value), _calls.get(id(value))
        paths = paths or isinstance(value, Dataset)
        if noted is not None and noted[0] is value:
            return f"{self.reference(kind)}({self._arguments(noted[1], noted[2], paths)})"
        if kind.__init__ is object.__init__ and not vars(value):
            return f"{self.reference(kind)}()"
        arguments = {}  # by the usual habit of keeping an argument under its own name
        for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
            if name in getattr(value, "__dict__", {}):
                arguments[name] = vars(value)[name]
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                raise Unwritable(f"a {kind.__qualname__} (nobody saw its arguments)")
        return f"{self.reference(kind)}({self._arguments((), arguments, paths)})"

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], paths: bool) -> str:
        written = [self.write(each, paths) for each in args]
        return ", ".join([*written, *(f"{name}={self.write(each, paths)}" for name, each in kwargs.items())])

    def reference(self, value: Any) -> str:
        """A class or function by the shortest public name that it has."""
        module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
        if not name or "<" in name:
            raise Unwritable(f"{name or value!r}".replace("<lambda>", "a lambda").replace("<locals>.", ""))
        if module in ("__main__", "__mp_main__"):
            self.names.add(name.partition(".")[0])
            return name
        if module == "builtins":
            return name
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            shorter = ".".join(parts[:length])
            if _attribute(sys.modules.get(shorter), name) is value:
                module = shorter
                break
        else:
            raise Unwritable(f"{module}.{name}")
        self.modules.add(module)
        file = Path(getattr(sys.modules[module], "__file__", None) or "/")
        self.local = self.local or (file.is_relative_to(self.home) and "site-packages" not in file.parts)
        return f"{module}.{name}"


def _attribute(module: ModuleType | None, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def changes(module: nn.Module, writer: Writer) -> list[str]:
    """Assignments that make of a fresh copy of the module what it is: submodules put in or taken out afterwards.

    Raises:
        Unwritable: where the copy can't be created, or a part has no expression.
    """
    noted = _calls.get(id(module))
    if noted is None:
        raise Unwritable(f"a {type(module).__qualname__}")
    state = torch.get_rng_state()
    try:
        fresh = type(module)(*noted[1], **noted[2])
    finally:
        torch.set_rng_state(state)
    lines = [f"model.{path} = {value}" for path, value in _changed(module, fresh, "", writer)]
    frozen = [name for name, each in module.named_parameters() if not each.requires_grad]
    born = {name for name, each in fresh.named_parameters() if not each.requires_grad}
    for name in frozen:
        if name not in born:
            lines.append(f"model.get_parameter({name!r}).requires_grad_(False)")
    return lines


def _changed(actual: nn.Module, fresh: nn.Module, path: str, writer: Writer) -> list[tuple[str, str]]:
    found, theirs = [], dict(fresh.named_children())
    for name, child in actual.named_children():
        at = f"{path}{name}"
        other = theirs.pop(name, None)
        if other is None or _unlike(child, other):
            found.append((at, writer.write(child)))
            if not at.replace(".", "").replace("_", "").isalnum() or any(part.isdigit() for part in at.split(".")):
                found[-1] = _through_modules(at, found[-1][1])
        else:
            found += _changed(child, other, f"{at}.", writer)
    if theirs:
        raise Unwritable(f"{type(actual).__qualname__} without {', '.join(theirs)}")
    return found


def _through_modules(at: str, value: str) -> tuple[str, str]:
    """The part of a container, as `layers._modules["0"]`, which an attribute can't name."""
    outer, _, name = at.rpartition(".")
    parts = "".join(f'._modules["{part}"]' for part in outer.split(".") if part)
    return f'{parts}._modules["{name}"]'.removeprefix("."), value


def _unlike(one: nn.Module, other: nn.Module) -> bool:
    shapes, others = ([each.shape for each in module.parameters(recurse=False)] for module in (one, other))
    return type(one) is not type(other) or one.extra_repr() != other.extra_repr() or shapes != others
