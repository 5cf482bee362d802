"""A working copy of the script's folder, and a guard in its processes: what they write, delete and call is named.

Refused: connections that leave this machine; writing or deleting what was there before outside the copy. The guard is
sys.addaudithook's, which sees Python's own calls, and torch.save, whose file is opened in C++; not what a C library or
a process that the script starts does by itself.
"""

import fnmatch
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from lockstep.commands.audit.events import emit, user_line
from lockstep.commands.audit.plan import Plan

LARGEST, TOTAL = 16 * 2**20, 256 * 2**20  # bytes of a file and of all files that are copied; others are linked
_SKIPPED = (
    *(".git", "__pycache__", ".venv", "venv", "env", "node_modules", ".mypy_cache", ".ruff_cache", "wandb", "*.pyc"),
)
_CACHES = (".cache", ".config", ".triton", ".nv", "site-packages", "__pycache__")  # parts of paths of libraries' own
_INNER = (  # what multiprocessing, torch and tempfile put into /tmp
    *("pymp-*", "torch_*", "torch-*", "torchelastic_*", "pytorch-errorfile-*", "*.lock", "tmp[a-z0-9_]*"),
)
_SYSTEM = ("/dev/", "/proc/", "/sys/", "/run/")
_FETCHING = {
    *("wget", "curl", "git", "pip", "pip3", "aria2c", "scp", "rsync", "gsutil", "aws", "huggingface-cli", "kaggle"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOST = 200  # files that a process names


def copy(origin: Path, home: Path) -> list[str]:
    """Copy a folder; large files become links, which the guard lets nobody write to. Returns what was not copied.

    Version control, environments and caches are left out.
    """
    home.mkdir(parents=True)
    linked = total = 0
    for folder, folders, files in os.walk(origin):
        folders[:] = [name for name in folders if not _skipped(name)]
        inside = home / Path(folder).relative_to(origin)
        for name in folders:
            if (Path(folder) / name).is_symlink():
                (inside / name).symlink_to((Path(folder) / name).resolve())
            else:
                (inside / name).mkdir()
        for name in (each for each in files if not _skipped(each)):
            path = Path(folder) / name
            if not path.is_file():  # a socket, a pipe, a broken link
                continue
            size = path.stat().st_size
            if size > LARGEST or total + size > TOTAL:
                (inside / name).symlink_to(path.resolve())
                linked += 1
            else:
                shutil.copy2(path, inside / name)
                total += size
        folders[:] = [name for name in folders if not (Path(folder) / name).is_symlink()]
    return [f"{linked} large file{'' if linked == 1 else 's'} linked to, not copied"] if linked else []


def _skipped(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in _SKIPPED)


def install(plan: Plan) -> None:
    """Watch and refuse, in this process, for good."""
    os.environ.setdefault("WANDB_MODE", "offline")
    guard = _Guard(plan)
    sys.addaudithook(guard.heard)
    guard.watch_save()


class _Guard:
    def __init__(self, plan: Plan) -> None:
        self.home, self.own = os.path.realpath(plan.home), os.path.realpath(Path(plan.events).parent)
        self.origin, self.temporary = os.path.realpath(plan.origin), os.path.realpath(tempfile.gettempdir())
        self.local = threading.local()
        self.begun = plan.begun
        self.reported: set[tuple[str, str]] = set()
        self.names = {"localhost", "", socket.gethostname(), "0.0.0.0", "::1", "::"}

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit event of Python's; an error that it raises is the call's."""
        answer = _HEARD.get(event)
        if answer is None or getattr(self.local, "inside", False):
            return
        self.local.inside = True
        try:
            answer(self, *args)
        finally:
            self.local.inside = False

    def opened(self, path: Any, mode: Any, flags: Any) -> None:
        del mode
        if isinstance(flags, int) and flags & _WRITING and isinstance(path, str | bytes | os.PathLike):
            self.file(path, "write")

    def deleted(self, path: Any, *_: Any) -> None:
        self.file(path, "delete")

    def renamed(self, source: Any, target: Any, *_: Any) -> None:
        self.file(source, "delete")
        self.file(target, "write")

    def file(self, name: Any, mode: str) -> None:
        """Name what the script writes or deletes; refuse to change what was there before, outside of the copy."""
        if not isinstance(name, str | bytes | os.PathLike):  # a descriptor
            return
        named = Path(os.fsdecode(name)).absolute()
        path = os.path.realpath(named) if mode == "write" else f"{os.path.realpath(named.parent)}/{named.name}"
        if path.startswith(_SYSTEM) or (_within(path, self.own) and not _within(path, self.home)):
            return
        inside = _within(path, self.home)
        if not inside and any(part in _CACHES for part in Path(path).parts):
            return
        refused, line = not inside and self.was_there(path), user_line()
        if not line or not (inside or refused or self.scripts(path)):
            return
        shown = os.path.relpath(path, self.home) if inside else path
        if (shown, mode) not in self.reported and len(self.reported) < _MOST:
            self.reported.add((shown, mode))
            emit("file", path=shown, mode=mode, elsewhere=not inside, refused=refused, at=line)
        if refused:
            raise PermissionError(f"lockstep audit does not let a script {mode} {path}, which was there before it")

    def scripts(self, path: str) -> bool:
        """Whether a file outside of the copy isn't one of those that libraries leave in the temporary folder."""
        if not _within(path, self.temporary):
            return True
        below = Path(path).relative_to(self.temporary).parts
        return bool(below) and not any(fnmatch.fnmatch(part, each) for part in below for each in _INNER)

    def was_there(self, path: str) -> bool:
        """Whether a file is older than the audit, whose ranks and earlier runs may write their own files."""
        try:
            found = os.lstat(path)
        except OSError:
            return False
        return not stat.S_ISDIR(found.st_mode) and found.st_ctime < self.begun

    def connected(self, sock: Any, address: Any) -> None:
        if isinstance(address, tuple) and sock.type != socket.SOCK_DGRAM:
            self.network(str(address[0]))

    def asked(self, host: Any, *_: Any) -> None:
        if host is not None:
            self.network(os.fsdecode(host) if isinstance(host, bytes) else str(host))

    def requested(self, url: Any, *_: Any) -> None:
        if isinstance(url, str) and "://" in url and not url.startswith("file:"):
            self.network(url.split("/")[2].rpartition("@")[2].partition(":")[0])

    def started(self, executable: Any, args: Any = None, *_: Any) -> None:
        line = executable if args is None else args
        words = os.fsdecode(line).split() if isinstance(line, str | bytes) else [os.fsdecode(each) for each in line]
        if words and Path(words[0]).name in _FETCHING and words[1:2] != ["rev-parse"]:
            self.refuse(" ".join(words[:4]))

    def network(self, host: str) -> None:
        """Refuse what is not this machine."""
        if host not in self.names and not host.startswith("127.") and host not in _addresses():
            self.refuse(host)

    def refuse(self, what: str) -> None:
        if (what, "network") not in self.reported:
            self.reported.add((what, "network"))
            emit("network", what=what, refused=True)
        raise ConnectionRefusedError(f"lockstep audit lets nothing leave this machine: {what}")

    def watch_save(self) -> None:
        """torch.save opens its file in C++."""
        import torch

        from lockstep.commands.audit.events import around

        def save(original: Any, thing: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(target, str | os.PathLike):
                self.local.inside = True
                try:
                    self.file(target, "write")
                finally:
                    self.local.inside = False
            return original(thing, target, *args, **kwargs)

        around(torch, "save", save)


_HEARD: dict[str, Any] = {
    "open": _Guard.opened,
    "os.remove": _Guard.deleted,
    "os.rmdir": _Guard.deleted,
    "shutil.rmtree": _Guard.deleted,
    "os.truncate": _Guard.deleted,
    "os.rename": _Guard.renamed,
    "socket.connect": _Guard.connected,
    "socket.getaddrinfo": _Guard.asked,
    "socket.gethostbyname": _Guard.asked,
    "urllib.Request": _Guard.requested,
    "subprocess.Popen": _Guard.started,
    "os.system": _Guard.started,
}


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _addresses() -> set[str]:
    """The addresses of this machine's interfaces."""
    import psutil

    return {each.address for interface in psutil.net_if_addrs().values() for each in interface}
