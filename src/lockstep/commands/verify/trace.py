"""What a run did, step by step: the record that one run leaves and another is compared with. JSON and safetensors."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config import Config

SAMPLES = 32  # entries of a tensor that are kept for every step, evenly spaced
KINDS = ("weights", "buffers", "gradients", "optimizer")  # of the tensors that are followed


@dataclass(frozen=True)
class Job:
    """One run to trace. `folder` is to hold its trace; config.execution says on how many processes and threads."""

    folder: str
    config: Config
    steps: int
    title: str
    patch: str = ""
    off: tuple[str, ...] = ()  # suspects to switch off (switches)
    lr: tuple[tuple[float, ...], ...] = ()  # by step and group: what "learning rate" off pins them to
    evaluate: bool = True
    start: str = ""  # a trace's folder, with whose final state to begin


@dataclass
class Trace:
    """A run on N processes. Lists hold one entry a step, as rank 0 has it unless it says otherwise."""

    processes: int
    steps_per_epoch: int = 0
    samples_per_epoch: int = 0
    names: list[str] = field(default_factory=list)  # of the tensors that are followed
    kinds: list[str] = field(default_factory=list)  # of each of them, one of KINDS
    ledger: list[str] = field(default_factory=list)
    images: list[int] = field(default_factory=list)  # fingerprint of the global batch as the model sees it
    loss: list[float] = field(default_factory=list)  # mean over the global batch
    norm: list[float] = field(default_factory=list)  # of the gradient that the optimizer gets; nan where it skipped
    skipped: list[bool] = field(default_factory=list)  # the optimizer was not called
    lr: list[list[float]] = field(default_factory=list)  # of each parameter group
    digests: list[list[int]] = field(default_factory=list)  # of each tensor after the step; and at the end
    shares: list[list[list[int]]] = field(default_factory=list)  # by step and rank: samples of each piece
    uncovered: list[int] = field(default_factory=list)  # steps, from 0, whose pieces miss a sample or repeat one
    outputs: list[int] = field(default_factory=list)  # exact mode: fingerprint of the outputs of all pieces
    diverged: list[tuple[int, int, str]] = field(default_factory=list)  # (step, rank, what) that is not as on rank 0
    metrics: dict[str, float] | None = None
    repeats: bool = False  # the second epoch has the first one's order
    batch_norm: bool = False
    exact: bool = False
    weights_sha256: str = ""  # as `train` writes it in its `end` record
    file_sha256: str = ""  # of the file final.safetensors that `train` would leave
    kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """samples/NAME: float64 [steps, entries], of each tensor after each step; final/NAME: the whole tensor at the end;
    scales: float64 [steps + 1, tensors], the largest magnitude of each after each step and at the end."""

    def of(self, *kinds: str) -> list[int]:
        """The places in `names` of tensors of these kinds."""
        return [i for i, kind in enumerate(self.kinds) if kind in kinds]


def write(trace: Trace, folder: Path) -> None:
    """Write trace.json and trace.safetensors into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: value for name, value in vars(trace).items() if name != "kept"}
    (folder / "trace.json").write_text(json.dumps(plain), encoding="utf-8")
    save_file(trace.kept, folder / "trace.safetensors")


def read(folder: Path) -> Trace:
    """The trace that `write` left in a folder."""
    trace = Trace(**json.loads((folder / "trace.json").read_text(encoding="utf-8")))
    trace.kept = load_file(folder / "trace.safetensors")
    return trace
