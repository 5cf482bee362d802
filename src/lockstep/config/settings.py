"""The fields of a run. `lockstep.config.Config` is these, checked together."""

from dataclasses import dataclass, field
from typing import Literal

from tyro.conf import Fixed

from lockstep.config.choose import ChooseConfig
from lockstep.config.data import DataConfig
from lockstep.config.execution import Execution, Recovery
from lockstep.config.link import LinkConfig
from lockstep.config.model import ModelConfig
from lockstep.config.optim import OptimConfig
from lockstep.config.samples import SamplesConfig

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


@dataclass(frozen=True)
class Settings:
    """What a run is made of, each part sound by itself."""

    recipe: Fixed[str] = "digits"
    epochs: int = 10
    """Passes over the training set."""
    batch_size: int = 64
    """Global batch size: samples per optimizer step over all processes."""
    accumulate: int = 1
    """Cut each global batch into this many micro-batches (less memory, same step); auto, or 0: found by trying."""
    exact: int = 0
    """Exact mode: cut each batch into so many slices; the same bits on any number of processes up to that (0: off)."""
    seed: int = 0
    """Seed of weights, order, augmentation and dropout."""
    precision: Precision = "fp32"
    """fp32, tf32 (NVIDIA GPUs), or autocast to bf16 or fp16 (fp16 with a gradient scaler)."""
    tta: Literal["none", "mirror", "shift"] = "none"
    """Evaluate on means of logits: of an image and its mirror image; shift: of those moved by a pixel both ways too."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is not finite: stop; skip that update; or go back and leave the batch out."""
    data: DataConfig = field(default_factory=DataConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    choose: ChooseConfig = field(default_factory=ChooseConfig)
    execution: Execution = field(default_factory=Execution)
    recovery: Recovery = field(default_factory=Recovery)

    def statistics(self, processes: int) -> Literal["pass", "global", "groups"]:
        """What batch norm takes its statistics over: what a process passes at once, the micro-batch, or groups.

        On one process torch's own does what "global" means, and a slice of exact mode is a batch of its own.
        """
        if self.model.group:
            return "groups"
        local = self.model.batch_norm == "local" or self.execution.strategy == "dp" or self.link.sync_every > 1
        return "pass" if local or self.exact or processes == 1 else "global"
