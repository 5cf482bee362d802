"""The flags; starts the script's processes, each recorded, and reads what they leave. Imports no torch."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from lockstep.config import Ints
from lockstep.config.fields import Arg, Count, Positive, require
from lockstep.errors import UserError

PLAN = "LOCKSTEP_REPRODUCE"  # the environment variable that the script's processes find the plan in
_PROGRAM = "from lockstep.commands.reproduce.inside import main; main()"
_GRACE_S = 60.0  # beyond the script's own time, to end and to write


@dataclass(frozen=True)
class Reproduce:
    """How to look at a script, and where to write."""

    out: Annotated[str, Arg(unset="SCRIPT-lockstep")] = ""
    """Folder for the recipe, its parts and the proof."""
    steps: Positive = 10
    """Steps to compare. The script's later epochs are cut to a batch each, for their rates."""
    nproc: Count = 0
    """Processes that the script is started with, as by torchrun (0: as `python SCRIPT`)."""
    gpus: int = 2
    """Pretended GPUs, for a script that starts a process for each it finds, or runs on none but a GPU."""
    compare: Annotated[Ints, Arg(least=1)] = (1, 2)
    """Numbers of processes that Lockstep takes the same steps on."""
    timeout: Annotated[float, Arg(above=0)] = 600.0
    """Seconds that the script may take."""

    def __post_init__(self) -> None:
        require(bool(self.compare), "--compare names no processes", "Give it as 1,2.")


@dataclass(frozen=True)
class Plan:
    """What the script's processes read. `folder` is where records go, `script` an absolute path."""

    folder: str
    script: str
    steps: int
    seconds: float  # that the script may take
    cuda: int = 0  # pretended GPUs; 0: none
    double: bool = False  # in float64

    @classmethod
    def read(cls) -> "Plan":
        """From the environment."""
        return cls(**json.loads(os.environ[PLAN]))


def record(plan: Plan, args: list[str], nproc: int, gpus: int = 0) -> list[dict[str, Any]]:
    """Run the script; the records of its ranks, in their order.

    `nproc`: start so many processes as torchrun would; 0: one, as `python SCRIPT` would, or as one of torchrun's where
    the script asks for that. A script that does without no GPU gets pretended ones: `gpus`, and one for each process.

    Raises:
        UserError: where no step was recorded, with the script's own last words.
    """
    output = Path(plan.folder) / "output.txt"
    text = Path(plan.script).read_text(encoding="utf-8", errors="replace").lower()
    records, ended = _run(plan, args, nproc, output)
    if not nproc and not _steps(records) and any("RANK" in record["end"] for record in records):
        nproc = 1
        records, ended = _run(plan, args, nproc, output)
    if not _steps(records) and ("cuda" in text or "nccl" in text):
        records, ended = _run(replace(plan, cuda=max(1, nproc, gpus)), args, nproc, output)
    if not _steps(records):
        ended = next((record["end"] for record in records if record["end"] != "done"), ended)
        last = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        remedy = "It has to train one model from a DataLoader, by an optimizer of torch.optim's kind. Its last words:"
        raise UserError(
            f"{plan.script} took no step that could be recorded: {ended}",
            "\n".join([remedy, *(f"  {line}" for line in last)]),
        )
    return records


def _steps(records: list[dict[str, Any]]) -> int:
    return min((len(record["steps"]) for record in records), default=0)


def _run(plan: Plan, args: list[str], nproc: int, output: Path) -> tuple[list[dict[str, Any]], str]:
    """The records of a start, and in words how it ended."""
    for path in Path(plan.folder).glob("rank-*"):
        path.unlink()
    env = os.environ | {PLAN: json.dumps(asdict(plan)), "PYTHONUNBUFFERED": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    with output.open("wb") as out:
        for rank in range(max(1, nproc)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, "-c", _PROGRAM, *args]
            started = env | (own if nproc else {})
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "start_new_session": True}
            ranks.append(subprocess.Popen(command, env=started, **how))
        ended = "it ended by itself"
        try:
            for process in ranks:
                process.wait(plan.seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            ended = f"it was not done after {plan.seconds:g} s"  # what was recorded until then counts
        finally:
            codes = [process.poll() for process in ranks]
            for process in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has spawned, too
                process.wait()
    if failed := next((code for code in codes if code), 0):
        ended = f"a process {f'was killed by signal {-failed}' if failed < 0 else f'ended with exit code {failed}'}"
    found = [json.loads(path.read_text(encoding="utf-8")) for path in Path(plan.folder).glob("rank-*.json")]
    found.sort(key=lambda record: record["rank"])
    return [record for record in found if record["steps"]] or found, ended
