"""Objects that a user names as `package.module:attribute`."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import StoppedBySignal, UserError, unknown

_T = TypeVar("_T")
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def without_exit(fn: Callable[..., _T], *args: Any) -> _T:
    """Call code that may be the user's. Where it ends the program, that is a UserError; what a signal raises passes.

    Exit code 0 would look to a scheduler as if the run were complete.
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
    place = next(frame for frame in reversed(frames) if "_sitebuiltins" not in frame.filename)
    return UserError(
        f"{place.filename}, line {place.lineno}: {place.line or place.name} ended the program, exit code "
        f"{ended.code or 0}",
        "What a run calls has to return or to raise an error: leave sys.exit() and exit() out of it.",
    )


def is_of_a_signal(error: BaseException | None) -> bool:
    """Whether Ctrl-C or a handler of lockstep.distributed.signals raised it."""
    return isinstance(error, (KeyboardInterrupt, StoppedBySignal))


@contextmanager
def _as_on_one_process() -> Iterator[None]:
    """Within, no variable of a launcher is set: what a module makes of them on import would follow the number of
    processes, unseen by any pass that pretends another one."""
    kept = {name: os.environ.pop(name) for name in _OF_A_LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def load_object(path: str, kind: str) -> Any:
    """Import what `package.module:attribute` names, looking in the current folder first.

    `kind` says what it is for, as "model". The module is imported as on one process, whatever the launcher's variables
    say. Its own errors pass through: their traceback is the best guide.
    Raises UserError for a path of another form, a module that is not found, or an attribute that it does not have.
    """
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        remedy = f"Name a Python module and what it holds, as --{kind} my_package.my_module:make."
        raise UserError(f"--{kind} {path!r} is not of the form package.module:factory", remedy)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # stays: loader workers and later imports of the module need it too
    try:
        with _as_on_one_process():
            value: Any = importlib.import_module(module_name)
    except SystemExit as ended:
        if is_of_a_signal(ended):
            raise
        message = f"--{kind} {path}: importing {module_name} ended the program, exit code {ended.code or 0}"
        raise UserError(message, 'Let the module do so only where it is run: if __name__ == "__main__": ...') from ended
    except KeyError as error:
        asked = next((name for name in _OF_A_LAUNCHER if name in error.args), "")
        if not asked:
            raise
        raise UserError(
            f"--{kind} {path}: importing {module_name} reads {asked}; modules are imported as on one process",
            f'Read it in a function, by os.environ.get("{asked}", "0").',
        ) from error
    except ModuleNotFoundError as error:
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise  # the module is there, and something that it imports is not
        remedy = f"Modules are looked for in {here} and among the installed packages."
        if error.name.endswith(".py"):
            remedy = f"Leave .py out, as Python's import does: --{kind} {path.replace('.py:', ':')}"
        raise UserError(f"--{kind} {path}: there is no module {error.name!r}", remedy) from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            public = [known for known in dir(value) if not known.startswith("_")]
            raise unknown(f"attribute of {module_name} in --{kind} {path}:", name, public)
        value = getattr(value, name)
    return value
