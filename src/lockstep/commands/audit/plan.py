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

    inside.py reads it in each process and calls `install(plan)` of each of its PARTS, after torch's import and before
    the script's first line. In a spawned child the same happens before the child's function is unpickled.
    """

    script: str  # in the working copy
    arguments: tuple[str, ...]  # `{nproc}` is replaced already, `{rank}` in each process
    home: str  # the working copy: the folder that the script runs in, and whose files are "the user's lines"
    origin: str  # the user's folder that `home` is a copy of
    events: str  # the folder of the processes' records, a file for each process id
    nproc: int  # processes, or pretended devices where the script starts its processes by itself
    nodes: int = 1  # machines that are pretended, with `nproc / nodes` processes and pretended devices each
    spawns: bool = False  # whether the script starts its processes by itself: one process is started then
    bare: bool = False  # whether the local rank is no argument though the script takes one, as torchrun has it
    module: str = ""  # the script's name as a module of `origin`, as `python -m` takes it; empty: it is run as a file
    local_rank: str = ""  # the option by which the script wants its local rank, as torch.distributed.launch had it
    cuda: bool = True  # whether torch.cuda is to pretend `nproc` devices: tensors on the CPU, gloo for NCCL
    samples: int = 256  # the most samples that a data set of the user's keeps
    epochs: int = 2  # training passes after which the process ends (event `cut`)
    steps: int = 8  # optimizer steps of a pass after which its loader ends, where data sets can't be shortened
    deadline_s: float = 600.0  # after which the processes are asked where they wait, and ended
    stall_s: float = 10.0  # without an event and without work, after which the same happens
    begun: float = 0.0  # time.time() at the command's start: younger files are its own
    started: float = 0.0  # time.time() at the start, which `t` of events counts from
    port: int = 0  # where the processes' store listens on the loopback, whatever port the script names

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
