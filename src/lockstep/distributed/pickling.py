"""What goes to other processes, and comes back from them: also what a notebook's cells define.

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
_INSTALL = "Install cloudpickle (`pip install 'lockstep-torch[notebook]'`), or write it to a file and import it."


@dataclass(frozen=True)
class Work:
    """What every rank is to call; pickled so that a fresh interpreter can open it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Raises UserError for what can't be sent."""
        what = f"launch() can't send {getattr(self.fn, '__qualname__', repr(self.fn))} and its arguments to others"
        remedy = "It takes along the global variables that it uses: make what can't be copied inside it."
        # the text of what was typed: file name -> (size, None, lines, file name), None for it will never change
        cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
        return _opened, (sendable((self.fn, self.args), what, remedy), cells)


def _opened(pickled: bytes, cells: dict[str, Any]) -> Work:
    linecache.cache.update(cells)
    return Work(*pickle.loads(pickled))


def sendable(value: Any, what: str, remedy: str) -> bytes:
    """A value in a form that other processes of this run can open. Raises UserError(what, remedy) where it has none."""
    main = sys.modules["__main__"]
    try:
        pickled = pickle.dumps(value)
        if b"__main__" not in pickled or getattr(main, "__spec__", None) or getattr(main, "__file__", None):
            return pickled
        why = "they can't import what a notebook or a console defines"
    except _UNSENDABLE as error:
        why = reason(error)
    try:
        return _by_value(importlib.import_module("cloudpickle"), value)
    except ImportError:
        raise UserError(f"{what}: {why}", _INSTALL) from None
    except _UNSENDABLE as error:
        raise UserError(f"{what}: {reason(error)}", remedy) from error


def pickled(value: Any) -> bytes:
    """A rank's value for its launcher; of a class that came by value, an instance of the very same class there."""
    try:
        return pickle.dumps(value)
    except _UNSENDABLE:
        if (by_value := sys.modules.get("cloudpickle")) is None:  # nothing came by value
            raise
        return _by_value(by_value, value)


def _by_value(cloudpickle: ModuleType, value: Any) -> bytes:
    """Pickled by cloudpickle, which from 3.1.3 on would send code without the name of its file, and so of its text."""

    def code(code: CodeType) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return marshal.loads, (marshal.dumps(code),)  # one version of Python on both sides

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined, misc]
        dispatch_table: ClassVar = ChainMap({CodeType: code}, cloudpickle.Pickler.dispatch_table)

    Pickler(sent := io.BytesIO()).dump(value)
    return sent.getvalue()
