"""Starts the script's processes, each recorded, and reads what they leave. Imports no torch."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

PLAN = "LOCKSTEP_REPRODUCE"  # the environment variable that the script's processes find the plan in
_PROGRAM = "from lockstep.commands.reproduce.inside import main; main()"
_APART: dict[str, Any] = {"start_new_session": True}
_GRACE_S = 60.0  # beyond the script's own time, to end and to write


@dataclass(frozen=True)
class Plan:
    """What a process of the script's is told. `folder` is where records go, `script` an absolute path."""

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
    records = _run(plan, args, nproc, output)
    if not nproc and not _steps(records) and any("RANK" in record["end"] for record in records):
        nproc = 1
        records = _run(plan, args, nproc, output)
    if not _steps(records) and ("cuda" in text or "nccl" in text):
        records = _run(replace(plan, cuda=max(1, nproc, gpus)), args, nproc, output)
    if not _steps(records):
        ended = next((record["end"] for record in records), "nothing was recorded")
        said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        raise UserError(
            f"{plan.script} took no step that could be recorded ({ended})",
            "It has to train one model from a DataLoader, by an optimizer of torch.optim's kind. Its last words:\n"
            + "\n".join(f"  {line}" for line in said),
        )
    return records


def _steps(records: list[dict[str, Any]]) -> int:
    return min((len(record["steps"]) for record in records), default=0)


def _run(plan: Plan, args: list[str], nproc: int, output: Path) -> list[dict[str, Any]]:
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
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, **_APART}
            ranks.append(subprocess.Popen(command, env=started, **how))
        try:
            for process in ranks:
                process.wait(plan.seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            pass  # what was recorded counts; without any step that is told
        finally:
            for process in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has spawned, too
                process.wait()

    return _records(plan)


def _records(plan: Plan) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in Path(plan.folder).glob("rank-*.json")]
    found.sort(key=lambda record: record["rank"])
    with_steps = [record for record in found if record["steps"]]
    return with_steps or found
