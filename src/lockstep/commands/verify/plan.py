"""What `lockstep verify` takes, and the runs that it compares."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from lockstep.config import Config, Ints
from lockstep.config.fields import Arg, check_fields, require

PER_STEP = {"fp32": 4e-6, "tf32": 5e-4, "bf16": 4e-3, "fp16": 5e-4}
"""Relative difference that plain mode grants a step: half a unit in the last place of the type in which factors are
rounded; for fp32, where the sums' own rounding counts, 32 units."""


@dataclass(frozen=True)
class Variant:
    """What a run has of all that may change nothing."""

    nproc: int
    threads: int
    workers: int
    hash_seed: int = 0
    reordered: bool = False  # folders are listed in another order

    def beside(self, base: "Variant") -> str:
        """What differs from another one, for people."""
        words = {
            "nproc": f"N = {self.nproc}",
            "threads": f"{self.threads} thread(s)",
            "workers": f"{self.workers} worker(s)",
            "hash_seed": f"hash seed {self.hash_seed}",
            "reordered": "folders listed in another order",
        }
        return ", ".join(text for name, text in words.items() if getattr(self, name) != getattr(base, name))


@dataclass(frozen=True)
class Plan:
    """What to verify."""

    nproc: Ints = (1, 2, 3)
    """Numbers of processes to compare; the others are compared with the first."""
    vary: bool = True
    """Give each run another hash seed, and the last number of processes other threads, workers and order of listed
    folders as well."""
    steps: Annotated[int, Arg(least=1)] = 30
    """Optimizer steps to compare (at most those of the run)."""
    patch: str = ""
    """package.module:function(run, world, config), called on every rank before the first step, to replace parts."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("nproc", "out")})

    def __post_init__(self) -> None:
        check_fields(self)
        counts, execution = ",".join(map(str, self.nproc)), self.config.execution
        different = len(set(self.nproc)) == len(self.nproc) > 0 and min(self.nproc) >= 1
        require(different, f"--nproc {counts} compares nothing", "Give different numbers, as 1,2,4.")
        require(len(self.nproc) > 1 or self.vary, f"--nproc {counts} compares nothing", "Give two or more, as 1,2,4.")
        remedy = "It starts numbers of processes on one machine: leave the flag out."
        require(execution.nnodes == 1, f"verify with --nnodes {execution.nnodes}", remedy)
        require(execution.strategy == "ddp", f"verify with --strategy {execution.strategy}", remedy)
        self.config.require_batch_for(max(self.nproc))

    @property
    def per_step(self) -> float:
        """The relative difference granted for each step taken; 0 in exact mode, which asks for the same bits."""
        return 0.0 if self.config.exact else PER_STEP[self.config.precision]

    def variants(self) -> tuple[Variant, dict[Variant, list[Variant]]]:
        """The base; and the runs to compare with it, each with those that vary only one of what it varies."""
        from lockstep.distributed.proc import threads_each

        execution = self.config.execution
        alone = [Variant(n, threads_each(execution.threads, n), execution.workers) for n in self.nproc]
        if not self.vary:
            return alone[0], {each: [] for each in alone[1:]}
        own = [replace(each, hash_seed=seed) for seed, each in enumerate(alone)]
        last = own[-1]
        other = {
            "threads": 1 if last.threads > 1 else 2,
            "hash_seed": len(own),
            "workers": 0 if last.workers else 1,
            "reordered": True,
        }
        if execution.loader == "resident":
            del other["workers"]
        one_by_one = [replace(last, **{name: value}) for name, value in other.items()]  # type: ignore[arg-type]
        runs = {each: [simple] for each, simple in zip(own[1:], alone[1:], strict=True)}
        return own[0], runs | {replace(last, **other): one_by_one}  # type: ignore[arg-type]
