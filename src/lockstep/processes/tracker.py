"""Python's resource tracker, which unlinks what a process leaves behind, and is one more process that can be killed."""

import os
from functools import cache
from multiprocessing import resource_tracker


@cache
def remember_resources() -> None:
    """Tell a tracker that follows a killed one what the other was told, as long as this process lives.

    Python starts the next one by itself and warns. It would know nothing of what there is, and end with a traceback for
    every name that it is to forget.
    """
    register, unregister = resource_tracker.register, resource_tracker.unregister
    known: set[tuple[str, str]] = set()
    last = (os.getpid(), 0)  # who told, and the pipe that it told through

    def tell() -> None:
        nonlocal last
        pipe = resource_tracker.getfd()  # starts a tracker where there is none
        assert pipe is not None
        now = os.getpid(), os.fstat(pipe).st_ino
        if now[0] != last[0]:  # a fork has its parent's tracker, and none of these is its own
            known.clear()
        elif now != last:
            for name, kind in known:
                register(name, kind)
        last = now

    def also_register(name: str, rtype: str) -> None:
        tell()
        known.add((name, rtype))
        register(name, rtype)

    def also_unregister(name: str, rtype: str) -> None:
        tell()
        known.discard((name, rtype))
        unregister(name, rtype)

    setattr(resource_tracker, "register", also_register)  # noqa: B010
    setattr(resource_tracker, "unregister", also_unregister)  # noqa: B010
