"""What `lockstep doctor` takes, and what a check comes to."""

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config import Names
from lockstep.config.execution import Device
from lockstep.config.fields import Arg, check_fields, require
from lockstep.errors import unknown

PARTS = ("launcher", "devices", "host", "storage", "network", "collectives", "machines")


@dataclass(frozen=True)
class Plan:
    """What to check, and for which run."""

    nproc: Annotated[int | Literal["auto"], Arg(least=1, most=1024)] = "auto"
    """Processes on this machine that the run will have; auto: as `lockstep train` has."""
    device: Device = "auto"
    """Kind of device that the run will have; cpu leaves the GPUs alone."""
    nnodes: int = 1
    """Machines in the run: start doctor on each of them, with the flags of the run."""
    node_rank: int = 0
    """This machine's number, from 0."""
    master_addr: Annotated[str, Arg(unset="with --nnodes")] = ""
    """Address of machine 0."""
    master_port: Annotated[int, Arg(unset="a free one")] = 0
    """Port on machine 0."""
    timeout: float = 20.0
    """Seconds that each part of the checks may take; machines wait five minutes for each other."""
    out: Annotated[str, Arg(unset="runs")] = ""
    """Folder for runs: its disk is measured."""
    only: Annotated[Names, Arg(unset="all")] = ()
    """Parts to check: launcher, devices, host, storage, network, collectives, machines."""
    json: bool = False
    """Print the findings as JSON."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.timeout > 0, f"--timeout {self.timeout} is not positive", "Give seconds, as 20.")
        message = f"--node-rank {self.node_rank} with --nnodes {self.nnodes}"
        require(0 <= self.node_rank < self.nnodes, message, "Machines are numbered from 0.")
        met = self.nnodes == 1 or (self.master_addr and self.master_port)
        require(met, "several machines need one meeting point", "Give --master-addr and --master-port, as for the run.")
        for part in self.only:
            if part not in PARTS:
                raise unknown("part", part, PARTS, "Separate several with commas, as --only host,network.")


@dataclass(frozen=True)
class Finding:
    """One check's outcome; what is not well has its remedy."""

    check: str
    status: str  # ok; skipped; warn: a run would go, and worse than it could; fail: it would not go
    message: str
    remedy: str = ""


def graded(check: str, message: str, *cases: tuple[bool, str, str]) -> Finding:
    """The finding with status and remedy of the first (condition, status, remedy) that is true; ok where none is."""
    status, remedy = next(((status, remedy) for true, status, remedy in cases if true), ("ok", ""))
    return Finding(check, status, message, remedy)
