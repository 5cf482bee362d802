"""Another number of processes for a run under way: the request, its answer, and where its state waits meanwhile.

The request is a file in the run folder. `lockstep resize` makes it, rank 0 finds it at a step boundary. Imports no
torch.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lockstep.distributed.files import atomic_write, write_error, writing
from lockstep.distributed.proc import alive
from lockstep.errors import UserError

REQUEST = "resize.json"  # its name in a run folder
HANDOVER = "LOCKSTEP_HANDOVER"  # tells ranks the folder with the state of those before them
LAUNCHER = "LOCKSTEP_LAUNCHER"  # tells them its pid
_PREFIX = "lockstep-resize-"
_SPARE = 1.1  # of the state's size, that a place must have free


@dataclass(frozen=True)
class Resize:
    """What all ranks return where so many others shall go on, from the state in a folder."""

    nproc: int
    folder: str


@dataclass(frozen=True)
class Request:
    """What was asked for, by a process of this machine, and what the run answered: nothing yet, or why it does not."""

    nproc: int
    pid: int
    answer: str = ""
    done: bool = False  # the answer is that there is nothing to do

    @property
    def waits(self) -> bool:
        """True where whoever asked still waits for an answer."""
        return not self.answer and alive(self.pid)


def read_request(folder: Path) -> Request | None:
    """The request in a run folder; None where there is none, or it is just being written."""
    try:
        found = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        return Request(int(found["nproc"]), int(found["pid"]), str(found["answer"]), found["done"] is True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def asked(folder: Path, nproc: int) -> Iterator[None]:
    """Inside, the run is asked for so many processes. Raises UserError where another request waits."""
    path, mine = folder / REQUEST, Request(nproc, os.getpid())
    if (other := read_request(folder)) is not None and not other.waits:
        path.unlink(missing_ok=True)  # of a command that was killed
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(asdict(mine), file)
    except FileExistsError as error:
        what = f", to {other.nproc} process(es), asked for by process {other.pid}" if other is not None else ""
        raise UserError(f"another resize of {folder} is under way{what}", "Wait until that is done.") from error
    except OSError as error:
        raise write_error(path, error) from error
    try:
        yield
    finally:
        if (left := read_request(folder)) is not None and left.pid == mine.pid:
            path.unlink(missing_ok=True)


def answer(folder: Path, request: Request, text: str, done: bool = False) -> None:
    """Tell who asked why the run stays as it is. Raises UserError where the folder can't be written."""
    path = folder / REQUEST
    with writing(path), atomic_write(path, durable=False) as temporary:
        temporary.write_text(json.dumps(asdict(replace(request, answer=text, done=done))), encoding="utf-8")


def places(size: int) -> Iterator[Path]:
    """New empty folders for a state of so many bytes: in memory, then on the disk. One that is not used is removed."""
    owner = os.environ.get(LAUNCHER, os.getpid())
    for place in ("/dev/shm", tempfile.gettempdir()):
        with suppress(OSError):
            if shutil.disk_usage(place).free >= size * _SPARE:
                yield Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{owner}-", dir=place))


def remove_states(mine: bool) -> None:
    """Remove states that nobody will read: of this launcher's ranks that failed, or of launchers that are gone."""
    for place in ("/dev/shm", tempfile.gettempdir()):
        for left in Path(place).glob(f"{_PREFIX}*"):
            owner = re.match(rf"{_PREFIX}(\d+)-", left.name)
            with suppress(OSError):
                if owner is None or left.lstat().st_uid != os.getuid():
                    continue
                if int(owner[1]) == os.getpid() if mine else not alive(int(owner[1])):
                    shutil.rmtree(left, ignore_errors=True)
