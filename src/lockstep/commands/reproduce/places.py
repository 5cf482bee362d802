"""Where in the user's own code something happens."""

import inspect
from pathlib import Path

import lockstep

_OURS = str(Path(lockstep.__file__).parent)


def user_line(home: str) -> str:
    """The innermost line on the stack of a file in or below a folder, as "train.py:41"; "" where there is none."""
    frame, inside = inspect.currentframe(), home.rstrip("/") + "/"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(inside) and "/site-packages/" not in name and not name.startswith(_OURS):
            return f"{name.removeprefix(inside)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
