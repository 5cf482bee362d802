"""What `lockstep doctor` takes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.config import Names
from lockstep.config.execution import processes_on
from lockstep.config.fields import require, require_finite
from lockstep.errors import unknown

PARTS = ("launcher", "devices", "host", "storage", "network", "master", "collectives")


@dataclass(frozen=True)
class Plan:
    """What to check, and for which run."""

    nproc: Annotated[int | Literal["auto"], arg(aliases=["--nproc-per-node"])] = "auto"
    """Processes on this machine that the run will have; auto: one per GPU, else one for two cores, at most 8."""
    workers: int = 2
    """Loader processes of each of them."""
    threads: int = 0
    """CPU threads of each (0: cores / processes on this machine)."""
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """Kind of device that the run will have; cpu leaves the GPUs alone."""
    nnodes: int = 1
    """Machines in the run."""
    master_addr: Annotated[str, arg(aliases=["--ip"], help_behavior_hint="(default: none)")] = ""
    """Address of machine 0: go there."""
    master_port: Annotated[int, arg(aliases=["--port"], help_behavior_hint="(default: a free one)")] = 0
    """Port on machine 0."""
    listen: float = 0.0
    """On machine 0: seconds to answer the other machines' doctors at --master-port, after the checks."""
    timeout: float = 20.0
    """Seconds that any check may take."""
    out: Annotated[str, arg(help_behavior_hint="(default: runs)")] = ""
    """Folder for runs: its disk is measured."""
    data_dir: Annotated[str, arg(help_behavior_hint="(default: $LOCKSTEP_DATA, else ./data)")] = ""
    """Where data sets live."""
    only: Annotated[Names, arg(help_behavior_hint="(default: all)")] = ()
    """Parts to check: launcher, devices, host, storage, network, master, collectives."""
    json: bool = False
    """Print the findings as JSON."""

    def __post_init__(self) -> None:
        require_finite(self)
        require(self.nproc == "auto" or self.nproc >= 1, f"--nproc {self.nproc} starts no process", "Use 1 or more.")
        for name, least in (("nnodes", 1), ("workers", 0), ("threads", 0), ("listen", 0)):
            value = getattr(self, name)
            require(value >= least, f"--{name} {value} is too little", f"Use {least} or more.")
        require(self.timeout > 0, f"--timeout {self.timeout} is not positive", "Give seconds, as 20.")
        require(0 <= self.master_port < 65536, f"--master-port {self.master_port} is not a port", "Use 1 to 65535.")
        require(
            self.master_port > 0 or not (self.master_addr or self.listen),
            "a machine 0 without a port",
            "Give --master-port, the same on every machine.",
        )
        require(
            not (self.master_addr and self.listen),
            "--listen is machine 0's, and --master-addr the others'",
            "Leave one of the two out.",
        )
        for part in self.only:
            if part not in PARTS:
                raise unknown("part", part, PARTS, "Separate several with commas, as --only host,network.")

    def wants(self, part: str) -> bool:
        """True where a part is to be checked."""
        return not self.only or part in self.only

    def processes(self, cores: int, gpus: int) -> int:
        """Processes on this machine, as `lockstep train` would start them."""
        return (gpus or processes_on(cores)) if self.nproc == "auto" else self.nproc
