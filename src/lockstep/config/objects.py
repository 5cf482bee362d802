"""Objects that a user names as `package.module:attribute`."""

import importlib
import importlib.util
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import UserError, unknown

_T = TypeVar("_T")


def without_exit(fn: Callable[..., _T], *args: Any) -> _T:
    """What a call of code that may be the user's returns; where it ends the program, that is a UserError.

    Exit code 0 would look to a scheduler as if the run were complete. What a signal raises passes through.
    """
    try:
        return fn(*args)
    except SystemExit as ended:
        if is_of_a_signal(ended):
            raise
        raise exit_error(ended) from ended


def exit_error(ended: SystemExit) -> UserError:
    """The error for code that ended the program, naming the line that did."""
    frames = traceback.extract_tb(ended.__traceback__)
    place = next(frame for frame in reversed(frames) if not frame.filename.endswith("_sitebuiltins.py"))
    return UserError(
        f"{place.filename}, line {place.lineno}: {place.line or place.name} ended the program, exit code "
        f"{ended.code or 0}",
        "What a run calls has to return or to raise an error: leave sys.exit() and exit() out of it.",
    )


def is_of_a_signal(error: BaseException | None) -> bool:
    """Whether Ctrl-C or a handler of lockstep.processes.signals raised it: 128 and the signal's number, as shells do.

    Code that calls exit(143) itself looks the same.
    """
    if isinstance(error, SystemExit):
        return isinstance(error.code, int) and error.code - 128 in signal.valid_signals()
    return isinstance(error, KeyboardInterrupt)


def load_object(path: str, kind: str) -> Any:
    """Import what `package.module:attribute` names, looking in the current folder first.

    `kind` says what it is for, as "model" or "dataset". The module's own errors pass through: their traceback is the
    user's best guide.

    Raises:
        UserError: for a path of another form, a module that is not found, or an attribute that it does not have.
    """
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise UserError(
            f"--{kind} {path!r} is not of the form package.module:factory",
            f"Name a Python module and what it holds, as --{kind} my_package.my_module:make.",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # stays: loader workers and later imports of the module need it too
    try:
        value: Any = importlib.import_module(module_name)
    except SystemExit as ended:
        if is_of_a_signal(ended):
            raise
        raise UserError(
            f"--{kind} {path}: importing {module_name} ended the program, exit code {ended.code or 0}",
            'Let the module do so only where it is run: if __name__ == "__main__": ...',
        ) from ended
    except ModuleNotFoundError as error:
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise  # the module is there, and something that it imports is not
        raise UserError(
            f"--{kind} {path}: there is no module {error.name!r}",
            f"Modules are looked for in {here} and among the installed packages.",
        ) from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            public = [known for known in dir(value) if not known.startswith("_")]
            raise unknown(f"attribute of {module_name} in --{kind} {path}:", name, public)
        value = getattr(value, name)
    return value
