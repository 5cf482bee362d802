"""What goes to a fresh interpreter, and what comes back from it: also what a notebook's cells define.

Pickle names a function by its module. A fresh interpreter imports a script under that name; a notebook, a console and
`python -c` have no file to import, so what they define goes by value (cloudpickle), with the text of their cells, which
tracebacks, torch.compile and torch.jit.script read.
"""

import importlib
import io
import linecache
import marshal
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, ClassVar

from lockstep.errors import UserError, reason

_UNSENDABLE = (pickle.PicklingError, AttributeError, TypeError, ValueError)  # what pickle raises for what it can't take
_REMEDY = "Install cloudpickle (`pip install 'lockstep-torch[notebook]'`), or write it to a file and import it."


@dataclass(frozen=True)
class Work:
    """What every worker is to call; pickled so that a fresh interpreter can open it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Raises UserError for what can't be sent."""
        return _opened, (_to_a_fresh_interpreter(self.fn, self.args), _cells())


def _opened(pickled: bytes, cells: dict[str, Any]) -> Work:
    linecache.cache.update(cells)
    return Work(*pickle.loads(pickled))


def _to_a_fresh_interpreter(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        pickled = pickle.dumps((fn, args))
        if b"__main__" not in pickled or _main_can_be_imported():
            return pickled
        why = f"launch() runs {name} in other processes, which can't import what a notebook or a console defines"
    except _UNSENDABLE as error:
        why = f"launch() can't send {name} and its arguments to other processes: {reason(error)}"
    try:
        by_value = importlib.import_module("cloudpickle")
    except ImportError:
        raise UserError(why, _REMEDY) from None
    try:
        return _by_value(by_value, (fn, args))
    except _UNSENDABLE as error:
        raise UserError(
            f"launch() can't send {name} and its arguments to other processes: {reason(error)}",
            "It takes along the global variables that it uses: make what can't be copied inside it.",
        ) from error


def pickled(value: Any) -> bytes:
    """A worker's value for its launcher; of a class that came by value, an instance of the very same class there."""
    try:
        return pickle.dumps(value)
    except _UNSENDABLE:
        if (by_value := sys.modules.get("cloudpickle")) is None:  # nothing came by value
            raise
        return _by_value(by_value, value)


def _by_value(cloudpickle: ModuleType, value: Any) -> bytes:
    """Pickled by cloudpickle, which from 3.1.3 on would send code without the name of its file, and so of its text."""

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined, misc]
        dispatch_table: ClassVar = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)

    Pickler(sent := io.BytesIO()).dump(value)
    return sent.getvalue()


def _code(code: CodeType) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return marshal.loads, (marshal.dumps(code),)  # one version of Python on both sides


def _main_can_be_imported() -> bool:
    """As multiprocessing's spawn method would."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or getattr(main, "__file__", None) is not None


def _cells() -> dict[str, Any]:
    """The text of what was typed: file name -> (size, None, lines, file name), None for it will never change."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
