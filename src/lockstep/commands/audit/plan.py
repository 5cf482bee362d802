"""What the command tells the processes that run the user's script: one file, JSON. Imports no torch."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "LOCKSTEP_AUDIT"  # names the plan's file, in the environment of the user's processes and of their children


@dataclass(frozen=True)
class Plan:
    """One start of the user's script.

    inside.py reads it in each process and calls `install(plan: Plan) -> None` of each of its PARTS, in their order,
    before the script's first line. torch is imported by then. A part patches what it has to, and calls
    `events.emit(...)`. In a child of mp.spawn the same happens before the child's function is unpickled.
    """

    script: str
    """The script to run, in the working copy."""
    arguments: tuple[str, ...]
    """Its arguments; `{nproc}` is replaced already."""
    home: str
    """The working copy: the folder that the script runs in, and whose files are "the user's lines"."""
    origin: str
    """The user's folder that `home` is a copy of."""
    events: str
    """The folder of the processes' records, a file per process id."""
    nproc: int
    """Processes, or pretend devices where the script starts its processes by itself."""
    nodes: int = 1
    """Machines that are pretended, with `nproc / nodes` processes and pretended devices each."""
    spawns: bool = False
    """Whether the script starts its processes by itself (one process is started then)."""
    bare: bool = False
    """Whether the local rank is not given as an argument though the script takes one, as torchrun doesn't."""
    local_rank: str = ""
    """The option by which the script wants its local rank, as torch.distributed.launch gave it; empty for none."""
    cuda: bool = True
    """Whether torch.cuda is to pretend: `nproc` devices, tensors on the CPU, NCCL answered by gloo."""
    samples: int = 256
    """The most samples that a data set of the user's keeps."""
    epochs: int = 2
    """Training passes after which the process ends (event `cut`)."""
    steps: int = 8
    """Optimizer steps of a pass after which its loader ends, where data sets can't be made small."""
    deadline_s: float = 600.0
    """Seconds after which the processes are asked where they wait, and ended."""
    stall_s: float = 10.0
    """Seconds without an event and without work after which the processes are asked where they wait, and ended."""
    begun: float = 0.0
    """time.time() at the command's start: what is younger, it has made."""
    started: float = 0.0
    """time.time() at the start, which `t` of events counts from."""
    port: int = 0
    """Where the processes' store listens on the loopback, whatever port the script names."""

    def write(self, path: Path) -> None:
        """Write the plan to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def read(path: Path) -> Plan:
    """The plan that `write` left."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return Plan(**(values | {"arguments": tuple(values["arguments"])}))


def current() -> Plan:
    """The plan of this process, by its environment."""
    return read(Path(os.environ[VARIABLE]))
