"""What `lockstep forecast` takes: its own flags beside those of `train`, checked before anything starts."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from tyro.conf import arg

from lockstep.commands.forecast.model import Link
from lockstep.config import Config, Execution, Ints, LinkConfig
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
        self._require_plain()
        self.config.require_batch_for(max(self.nproc))

    def _require_plain(self) -> None:
        config, execution = self.config, self.config.execution
        require(
            not config.exact,
            f"forecast with --exact {config.exact}: the model is that of DDP's reduction, not of exact mode's",
            "Leave --exact out.",
        )
        require(
            execution.strategy == "ddp",
            f"forecast with --strategy {execution.strategy}: it forecasts DDP",
            "Leave --strategy out.",
        )
        require(
            config.link == LinkConfig() and execution.model_parallel == 1,
            "forecast with --compress, --sync-every or --model-parallel: it forecasts plain DDP",
            "Leave them out.",
        )
        require(
            execution.nnodes == 1 or self.stated is None,
            "--nnodes measures the link between machines, and an interconnect is named, too",
            "Leave one of the two out.",
        )

    @classmethod
    def of(cls, config: Config, **chosen: Any) -> "Plan":
        """The plan for a config."""
        return cls(config=config, **chosen)

    @property
    def stated(self) -> Link | None:
        """The interconnect as named or given by hand; None where it is to be measured."""
        if self.interconnect == MEASURED and self.bandwidth_mbit == 0:
            return None
        latency, mbit = LINKS.get(self.interconnect, (0.0, 0.0))
        latency = self.latency_us if self.latency_us >= 0 else latency
        mbit = self.bandwidth_mbit or mbit
        name = (
            self.interconnect if (latency, mbit) == LINKS.get(self.interconnect) else f"{latency:g} us, {mbit:g} Mbit/s"
        )
        return Link(name, latency * 1e-6, mbit * 1e6 / 8)

    def pieces(self, processes: int) -> tuple[int, int]:
        """(images of the largest share of a micro-batch, micro-batches of a step)."""
        micro = -(-self.config.batch_size // self.config.accumulate)
        return -(-micro // processes), self.config.accumulate

    def config_for(self, piece: int) -> Config:
        """One process's own part as a run of its own: `piece` images a micro-batch."""
        execution = replace(self.config.execution, nproc=1, nnodes=1, node_rank=0)
        return replace(self.config, execution=execution, batch_size=piece * self.config.accumulate)

    def execution_for(self, processes: int, threads: int, **changed: Any) -> Execution:
        """Where so many processes of each machine run."""
        return replace(self.config.execution, nproc=processes, threads=threads, **changed)


@dataclass(frozen=True)
class Layout:
    """Where N processes run: how they share the machines."""

    processes: int
    local: int  # on each machine
    threads: int  # of each
    together: int  # what can be measured at once on one machine
    crowding: float  # threads for each core, at least 1

    @property
    def group(self) -> tuple[int, int, bool]:
        """Numbers of processes with the same group are measured in one go."""
        return self.threads, self.together, self.processes > 1


def layout(plan: Plan, processes: int, cores: int, gpus: int) -> Layout:
    """The layout of N processes; `gpus` is 0 where the CPU computes."""
    execution = plan.config.execution
    here = plan.stated is None and execution.nnodes == 1
    local = min(processes, plan.per_machine or (processes if here else 1))
    threads = execution.threads or max(1, cores // local)
    if gpus:
        return Layout(processes, local, threads, min(local, gpus), 1.0)
    together = min(local, max(1, cores // threads))
    return Layout(processes, local, threads, together, max(1.0, local * threads / cores))


def own_cost(stated: Link, loopback: Link | None) -> Link:
    """A stated link with what the software adds, as measured between processes of one machine where it was.

    Its latency comes on top of the software's own, and it is no faster than the software copies and adds.
    """
    if loopback is None:
        return stated
    return replace(
        stated,
        alpha_s=stated.alpha_s + loopback.alpha_s,
        bandwidth=min(stated.bandwidth, loopback.bandwidth),
        stolen_core_s=loopback.stolen_core_s,
        error=loopback.error,
    )
