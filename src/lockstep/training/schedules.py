"""Learning-rate schedules: pure functions of the samples seen, whatever the batch size, accumulation or resuming."""

import math
from bisect import bisect_right

from lockstep.config import OptimConfig

WARMUP_START = 0.01
"""Where the warm-up begins, as a part of the peak: not 0, so that the first step moves (as torchvision's recipes)."""

# torch.optim.lr_scheduler.OneCycleLR's defaults, after Smith and Topin, "Super-convergence", 2017
_RISE = 0.3  # part of the run that goes up
_FIRST = 1 / 25  # first rate / peak
_LAST = _FIRST / 1e4  # last rate / peak


def factor(optim: OptimConfig, samples: int, samples_per_epoch: int, epochs: int) -> float:
    """Learning rate of the next step as a part of the peak, in [0, 1].

    `samples` are those seen before the step. A linear warm-up over `optim.warmup_epochs` multiplies the schedule:
    constant; linear and cosine, from the end of the warm-up to 0 at the end of the run; step and multistep, which drop
    at epochs counted from the start of the run; one-cycle over the whole run. Beyond the run's end it stays at its
    last value.
    """
    total = samples_per_epoch * epochs
    warmup = optim.warmup_epochs * samples_per_epoch
    ramp = WARMUP_START + (1 - WARMUP_START) * samples / warmup if samples < warmup else 1.0
    match optim.schedule:
        case "constant":
            shape = 1.0
        case "linear":
            shape = min(1.0, max(0.0, (total - samples) / (total - warmup))) if warmup < total else 1.0
        case "step":
            # half a sample absorbs the rounding of epochs: 1.1 * 50 > 55
            shape = optim.gamma ** math.floor((samples + 0.5) / (optim.step_epochs * samples_per_epoch))
        case "multistep":
            drops = sorted(epoch * samples_per_epoch for epoch in optim.milestones)
            shape = optim.gamma ** bisect_right(drops, samples + 0.5)
        case "cosine":
            shape = _cosine(1.0, 0.0, (samples - warmup) / (total - warmup)) if warmup < total else 1.0
        case _:  # one-cycle
            peak = _RISE * total
            if samples < peak:
                shape = _cosine(_FIRST, 1.0, samples / peak)
            else:
                shape = _cosine(1.0, _LAST, (samples - peak) / (total - peak))
    return ramp * shape


def never_reached(optim: OptimConfig, epochs: int) -> list[str]:
    """Notes on what of a schedule lies beyond the end of a run of so many epochs, as of one that was cut short."""
    notes = []
    if optim.warmup_epochs >= epochs:
        notes.append(f"note: --warmup-epochs {optim.warmup_epochs:g} of {epochs}: --lr is never reached")
    late = [f"{epoch:g}" for epoch in optim.milestones if epoch >= epochs]
    if optim.schedule == "multistep" and late:
        notes.append(f"note: --milestones {','.join(late)}: there is no such drop in {epochs} epoch(s)")
    return notes


def _cosine(start: float, end: float, progress: float) -> float:
    """Half a cosine wave from start (at progress 0 and before) to end (at 1 and after)."""
    progress = min(max(progress, 0.0), 1.0)
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
