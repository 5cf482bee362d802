"""How often samples come, and how those of a batch are mixed with each other."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from tyro.conf import arg

from lockstep.config.fields import require, require_at_least, require_finite


@dataclass(frozen=True)
class SamplesConfig:
    """How often samples come, and how they are mixed with each other."""

    balance: Literal["none", "equal", "sqrt"] = "none"
    """Draw all classes equally often, or as the square root of how many images they have."""
    aug_repeats: Annotated[int, arg(aliases=["--ra-reps"])] = 1
    """Repeated augmentation: each image comes so many times in its batch, augmented anew; --batch-size counts all."""
    mixup: Annotated[float, arg(aliases=["--mixup-alpha"])] = 0.0
    """Mix pairs of images and their labels by mixup, with a part drawn from Beta(alpha, alpha) (0: off)."""
    cutmix: Annotated[float, arg(aliases=["--cutmix-alpha"])] = 0.0
    """Exchange a box between pairs of images by CutMix, its area drawn from Beta(alpha, alpha) (0: off)."""
    mix_prob: Annotated[float, arg(aliases=["--mixup-prob"])] = 1.0
    """The part of the pairs that --mixup and --cutmix mix."""
    mix_switch: Annotated[float, arg(aliases=["--mixup-switch-prob"])] = 0.5
    """With both on, the part of the mixed pairs that CutMix takes."""
    mix_off_epochs: int = 0
    """The last epochs, in which nothing is mixed."""

    @property
    def mixes(self) -> bool:
        """True where samples are mixed at all."""
        return bool(self.mixup or self.cutmix)

    def for_batch(self, size: int) -> "SamplesConfig":
        """The same for a batch of any size, as a trial of one rank's share has it: it may be odd, or a single image."""
        mixup, cutmix = (self.mixup, self.cutmix) if size > 1 else (0.0, 0.0)
        return replace(self, aug_repeats=1, mixup=mixup, cutmix=cutmix)

    def __post_init__(self) -> None:
        require_finite(self)
        require_at_least(1, self, "aug_repeats")
        require_at_least(0, self, "mixup", "cutmix", "mix_off_epochs")
        for name in ("mix_prob", "mix_switch"):
            value, flag = getattr(self, name), name.replace("_", "-")
            require(0 <= value <= 1, f"--{flag} {value} is not in [0, 1]", "Give the part of the pairs, as 0.5.")
