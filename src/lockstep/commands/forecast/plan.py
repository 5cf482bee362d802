"""What `lockstep forecast` takes: its own flags beside those of `train`, checked before anything starts."""

from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

from tyro.conf import arg

from lockstep.commands.forecast.model import Link
from lockstep.config import Config, Ints, LinkConfig
from lockstep.config.fields import require, require_finite
from lockstep.errors import unknown

MEASURED = "measured"

# name -> (latency of one message in us, Mbit/s in each direction). Nominal rates; Ethernet's without the 6 % that
# headers and gaps take of 1,500-byte frames. PCIe: 16 lanes of version 4; NVLink: version 4 with 18 links.
LINKS = {
    "100mbit": (100.0, 94.0),
    "1gbit": (50.0, 940.0),
    "10gbit": (30.0, 9_400.0),
    "25gbit": (20.0, 23_500.0),
    "100gbit": (10.0, 94_000.0),
    "pcie4": (5.0, 252_000.0),
    "nvlink": (3.0, 3_600_000.0),
}


@dataclass(frozen=True)
class Plan:
    """What to forecast."""

    nproc: Annotated[Ints, arg(aliases=["--nproc-per-node"])] = (1, 2, 4, 8, 16)
    """Numbers of processes to forecast, over all machines."""
    interconnect: str = MEASURED
    """measured: between processes of this machine, or of --nnodes machines; or 100mbit, 1gbit, 10gbit, 25gbit, 100gbit,
    pcie4, nvlink."""
    latency_us: float = -1.0
    """Latency of one message of the interconnect (-1: the interconnect's)."""
    bandwidth_mbit: float = 0.0
    """Mbit/s of the interconnect in each direction (0: the interconnect's)."""
    per_machine: int = 0
    """Processes on each machine (0: all of them where the interconnect is this machine's own, else one)."""
    seconds: float = 3.0
    """How long to measure each micro-batch size."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("nproc",)})

    def __post_init__(self) -> None:
        require_finite(self)
        counts = ",".join(map(str, self.nproc))
        require(
            bool(self.nproc) and min(self.nproc) >= 1 and sorted(set(self.nproc)) == list(self.nproc),
            f"--nproc {counts} is not a growing list of numbers of processes",
            "Give it as 1,2,4.",
        )
        if self.interconnect not in (MEASURED, *LINKS):
            raise unknown(
                "interconnect", self.interconnect, (MEASURED, *LINKS), "Or give --latency-us and --bandwidth-mbit."
            )
        require(
            (self.latency_us >= 0) == (self.bandwidth_mbit > 0) or self.interconnect != MEASURED,
            "an interconnect needs both numbers",
            "Give --latency-us and --bandwidth-mbit together, or one of them beside --interconnect NAME.",
        )
        require(self.bandwidth_mbit >= 0, f"--bandwidth-mbit {self.bandwidth_mbit} is negative", "Give Mbit/s.")
        require(self.per_machine >= 0, f"--per-machine {self.per_machine} is negative", "Use 0 for the default.")
        require(self.seconds > 0, f"--seconds {self.seconds} is not positive", "Give seconds, as 3.")
        config, execution = self.config, self.config.execution
        config.require_batch_for(max(self.nproc))
        other = config.link != LinkConfig() or execution.model_parallel > 1
        for given, flags, why in (
            (config.exact, f"--exact {config.exact}", "the model is that of DDP's reduction, not of exact mode's"),
            (execution.strategy != "ddp", f"--strategy {execution.strategy}", "it forecasts DDP"),
            (other, "--compress, --sync-every or --model-parallel", "it forecasts plain DDP"),
        ):
            require(not given, f"forecast with {flags}: {why}", "Leave it out.")
        require(
            execution.nnodes == 1 or self.stated is None,
            "--nnodes measures the link between machines, and an interconnect is named, too",
            "Leave one of the two out.",
        )

    @property
    def stated(self) -> Link | None:
        """The interconnect as named or given by hand; None where it is to be measured."""
        if self.interconnect == MEASURED and self.bandwidth_mbit == 0:
            return None
        known = LINKS.get(self.interconnect, (0.0, 0.0))
        latency = self.latency_us if self.latency_us >= 0 else known[0]
        mbit = self.bandwidth_mbit or known[1]
        name = self.interconnect if (latency, mbit) == known else f"{latency:g} us, {mbit:g} Mbit/s"
        return Link(name, latency * 1e-6, mbit * 1e6 / 8)

    def piece(self, processes: int) -> int:
        """Images of the largest share of a micro-batch."""
        micro = -(-self.config.batch_size // self.config.accumulate)
        return -(-micro // processes)

    def config_for(self, piece: int) -> Config:
        """One process's own part as a run of its own: `piece` images a micro-batch."""
        alone = self.config.with_execution(nproc=1, nnodes=1, node_rank=0)
        size = piece * self.config.accumulate
        return replace(alone, batch_size=size, samples=alone.samples.for_batch(size))


class Group(NamedTuple):
    """Processes that are measured in one go, for all numbers of processes to which they apply."""

    threads: int  # of each
    together: int  # on one machine
    reduces: bool  # each as one of several

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.together} process(es) of {self.threads} thread(s)"


@dataclass(frozen=True)
class Layout:
    """Where N processes run: how they share the machines."""

    processes: int
    group: Group  # as which it is measured, as far as one machine holds so many at once
    crowding: float  # threads for each core, at least 1


def layout(plan: Plan, processes: int, cores: int, gpus: int) -> Layout:
    """The layout of N processes; `gpus` is 0 where the CPU computes."""
    execution = plan.config.execution
    here = plan.stated is None and execution.nnodes == 1
    local = min(processes, plan.per_machine or (processes if here else 1))
    threads = execution.threads or max(1, cores // local)
    together = min(local, gpus or max(1, cores // threads))
    group = Group(threads, together, reduces=processes > 1)
    return Layout(processes, group, 1.0 if gpus else max(1.0, local * threads / cores))


def own_cost(stated: Link, loopback: Link) -> Link:
    """A stated link with what the software adds, as measured between processes of one machine.

    Its latency comes on top of the software's own, and it is no faster than the software copies and adds.
    """
    alpha_s, bandwidth = stated.alpha_s + loopback.alpha_s, min(stated.bandwidth, loopback.bandwidth)
    return replace(loopback, name=stated.name, alpha_s=alpha_s, bandwidth=bandwidth)
