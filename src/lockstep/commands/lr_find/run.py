"""The range test itself (Smith, "Cyclical learning rates for training neural networks", arXiv:1506.01186, section 3.3).

The rate is a function of the step, so that any number of processes takes the same steps by the same rates.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lockstep.commands.lr_find.picture import draw
from lockstep.commands.lr_find.plan import Plan
from lockstep.errors import UserError
from lockstep.processes.files import atomic_write, write_error, write_json
from lockstep.processes.world import World
from lockstep.training.assemble import Run, assemble
from lockstep.training.loop import steps
from lockstep.training.state import State

_DIVERGED = 4.0  # times the lowest loss so far: nothing more is to be learned from what follows
_WIDTH = 0.05  # of all steps: as far as each side of a smoothed loss reaches


@dataclass(frozen=True)
class Found:
    """The curve, a value a step, and what it says."""

    lr: list[float]
    loss: list[float]  # of each step's batch, before its update
    smoothed: list[float]
    suggestion: float | None  # where the smoothed loss falls most steeply over log(lr); None: it falls nowhere
    lowest: float  # the rate of the lowest smoothed loss
    diverged: bool  # the loss rose to a multiple of its lowest, or was no number, before --lr-max


def find(world: World, plan: Plan) -> None:
    """Try the rates, and have rank 0 write what was found; all ranks call it together."""
    config = replace(plan.config, optim=replace(plan.config.optim, ema=0.0, ema_warmup=False), on_nonfinite="stop")
    config.require_batch_for(world.size)
    run = assemble(config, world)
    lr, loss = _curve(world, run, plan, config.lr)
    found = read_curve(lr, loss, plan.steps)
    if world.rank > 0:
        return
    write_json(plan.numbers, {**asdict(found), "config": config.to_dict(), "processes": world.size})
    print(described(found))
    picture = draw(found.lr, found.loss, found.smoothed, found.suggestion, config)
    if picture is None:
        print(f"no picture: it needs matplotlib (pip install 'lockstep-torch[compare]'); the numbers: {plan.numbers}")
        return
    try:
        with atomic_write(Path(plan.file)) as temporary:
            temporary.write_bytes(picture)
    except OSError as error:
        raise write_error(Path(plan.file), error) from error
    print(f"picture {plan.file}, numbers {plan.numbers}")


def _curve(world: World, run: Run, plan: Plan, peak: float) -> tuple[list[float], list[float]]:
    """Rates and mean losses of the steps, the same on all ranks, up to where the loss has risen too far."""
    rates: list[float] = []

    def factor(_: int) -> float:
        rates.append(plan.lr_min * (plan.lr_max / plan.lr_min) ** (len(rates) / (plan.steps - 1)))
        return rates[-1] / peak

    run.step.schedule = factor
    state, losses = State(), list[float]()
    while True:
        run.enter(state.epochs)
        for _, samples, loss in steps(run, state, lambda _: None):
            assert loss is not None, "nothing is left out"
            each = world.rows(loss.detach().double().reshape(1).to(_summing(world)))
            losses.append(sum(each.flatten().tolist()) / samples)
            smooth = smoothed(losses, plan.steps)
            gone = not math.isfinite(losses[-1]) or smooth[-1] > _DIVERGED * min(smooth)
            if gone or len(losses) == plan.steps:
                return rates, losses
        state.epochs += 1


def _summing(world: World) -> torch.device:
    return torch.device("cpu") if world.device.type == "mps" else world.device  # MPS has no float64


def smoothed(losses: list[float], steps: int) -> list[float]:
    """Weighted means over neighbours on both sides, so that no place of the curve is moved; at the ends over fewer."""
    reach = max(1, round(_WIDTH * steps))
    weights = np.bartlett(2 * reach + 3)[1:-1]
    ones = np.convolve(np.ones(len(losses)), weights)[reach : reach + len(losses)]
    means = np.convolve(np.asarray(losses), weights)[reach : reach + len(losses)] / ones
    return [float(mean) for mean in means]


def read_curve(lr: list[float], loss: list[float], steps: int) -> Found:
    """What a curve says. Raises UserError where it is too short to say anything."""
    finite = next((i for i, value in enumerate(loss) if not math.isfinite(value)), len(loss))
    lr, kept = lr[:finite], loss[:finite]
    if finite < 5:
        raise UserError(
            f"the loss was no number after {finite} step(s) at a learning rate of {lr[-1] if lr else 0:g}",
            "Begin with a smaller --lr-min, or look at the data.",
        )
    smooth = smoothed(kept, steps)
    lowest = int(np.argmin(smooth))
    slope = np.gradient(smooth, np.log(lr))[: lowest + 1]
    steepest = int(np.argmin(slope))
    diverged = finite < len(loss) or smooth[-1] > _DIVERGED * smooth[lowest]
    return Found(lr, kept, smooth, lr[steepest] if slope[steepest] < 0 else None, lr[lowest], diverged)


def described(found: Found) -> str:
    """What was found, in a sentence or two."""
    if found.suggestion is None:
        return "the loss fell nowhere between these rates: try others, or look at the data"
    end = f"it diverged at {found.lr[-1]:.3g}" if found.diverged else f"it was tried up to {found.lr[-1]:.3g}"
    return (
        f"suggestion: --lr {found.suggestion:.2g}, where the loss fell most steeply; it was lowest at "
        f"{found.lowest:.2g}, and {end}"
    )
