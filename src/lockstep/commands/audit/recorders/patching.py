"""How recorders get between the user's script and torch."""

from collections.abc import Callable
from functools import wraps
from typing import Any

ORIGINAL = "_lockstep_original"  # of a patched function: what a TorchFunctionMode is to call, or it'd be called twice


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by a function that calls `wrapper(original, *args, **kwargs)`, and looks like it."""
    original = getattr(owner, name)

    @wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(patched, ORIGINAL, original)
    setattr(owner, name, patched)


def given(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    """An argument by its place or its name."""
    return kwargs[name] if name in kwargs else args[place] if len(args) > place else default
