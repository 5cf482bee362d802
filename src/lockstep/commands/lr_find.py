"""`lockstep lr-find`: a range test of the learning rate.

After Smith, "Cyclical learning rates for training neural networks", arXiv:1506.01186, section 3.3. The rate is a
function of the step, so that any number of processes takes the same steps by the same rates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.commands.measuring import endless_steps, require_one_machine
from lockstep.commands.shared.arguments import launched, planned
from lockstep.config import Config
from lockstep.config.fields import check_fields, require
from lockstep.distributed.files import new_file, whole_file, write_json

if TYPE_CHECKING:
    from lockstep.distributed.world import World

_DIVERGED = 4.0  # times the lowest loss so far: nothing more is to be learned from what follows
_WIDTH = 0.05  # of all steps: as far as each side of a smoothed loss reaches


@dataclass(frozen=True)
class Plan:
    """What to try."""

    lr_min: float = 1e-6
    """The first rate."""
    lr_max: float = 10.0
    """The last rate, if the loss has not risen far above its lowest before."""
    steps: int = 100
    """Steps from the one to the other, each by the same factor."""
    file: str = "lr-find.png"
    """The picture; the numbers are beside it, as .json."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("out", "log", "resume")})

    def __post_init__(self) -> None:
        check_fields(self)
        message = f"--lr-min {self.lr_min:g} is not between 0 and --lr-max {self.lr_max:g}"
        require(0 < self.lr_min < self.lr_max, message, "Give two rates, as --lr-min 1e-6 --lr-max 10.")
        require(self.steps >= 20, f"--steps {self.steps} give no curve", "Use 20 or more; a usual number is 100.")
        require(self.file.endswith(".png"), f"--file {self.file}: the picture is a .png", "Name it so.")
        require_one_machine("lr-find", self.config)


def main(args: list[str]) -> int:
    """Find a learning rate."""
    about = (
        "Train by the recipe `{}` for some steps in which the learning rate rises from --lr-min to --lr-max, each time "
        "by the same factor, draw the loss over the rate, and suggest where it falls most steeply. Leaves no run."
    )
    plan: Plan = planned("lr-find", lambda config: Plan(config=config), args, about)
    from lockstep.training.run_folder import check

    for path in (Path(plan.file), Path(plan.file).with_suffix(".json")):
        new_file(str(path), "--file")
    check(plan.config)
    return launched(find, plan, execution=plan.config.execution)


def find(world: "World", plan: Plan) -> None:
    """Try the rates, up to where the loss has risen too far; rank 0 writes the result. All ranks call it together."""
    from lockstep.training.assemble import assemble

    config = replace(plan.config, optim=replace(plan.config.optim, ema=0.0, ema_warmup=False), on_nonfinite="stop")
    config.require_batch_for(world.size)
    rates, losses, run = list[float](), list[float](), assemble(config, world)

    def factor(_: int) -> float:
        rates.append(plan.lr_min * (plan.lr_max / plan.lr_min) ** (len(rates) / (plan.steps - 1)))
        return rates[-1] / config.lr

    run.step.schedule = factor
    for samples, loss, _ in endless_steps(run):
        losses.append(sum(world.gather(loss.total())) / samples)
        smooth = smoothed(losses, plan.steps)
        if not math.isfinite(losses[-1]) or smooth[-1] > _DIVERGED * min(smooth) or len(losses) == plan.steps:
            break
    found = read_curve(rates, losses, plan.steps)
    if world.rank > 0:
        return
    numbers = Path(plan.file).with_suffix(".json")
    write_json(numbers, {**found, "config": config.to_dict(), "processes": world.size})
    print(described(found))
    try:
        with whole_file(Path(plan.file)) as temporary:
            draw(found, config, temporary)
    except ModuleNotFoundError:
        print(f"no picture: it needs matplotlib (pip install 'lockstep-torch[compare]'); the numbers: {numbers}")
    else:
        print(f"picture {plan.file}, numbers {numbers}")


def smoothed(losses: Sequence[float], steps: int) -> list[float]:
    """Weighted means over neighbours on both sides, so that no place of the curve is moved; at the ends over fewer."""
    import numpy as np

    reach = max(1, round(_WIDTH * steps))
    weights = np.bartlett(2 * reach + 3)[1:-1]
    sums, ones = (np.convolve(values, weights)[reach:-reach] for values in (losses, np.ones(len(losses))))
    return [float(mean) for mean in sums / ones]


def read_curve(lr: Sequence[float], loss: Sequence[float], steps: int) -> dict[str, Any]:
    """What a curve says, with the curve itself.

    `suggestion` is the rate where the smoothed loss falls most steeply over log(lr), None where it falls nowhere;
    `lowest` is that of the lowest smoothed loss.

    Raises:
        UserError: where it is too short to say anything.
    """
    import numpy as np

    finite = next((i for i, value in enumerate(loss) if not math.isfinite(value)), len(loss))
    message = f"the loss was no number after {finite} step(s) at a learning rate of {lr[max(0, finite - 1)]:g}"
    require(finite >= 5, message, "Begin with a smaller --lr-min, or look at the data.")
    rates, smooth = list(lr[:finite]), smoothed(loss[:finite], steps)
    lowest = int(np.argmin(smooth))
    slope = np.gradient(smooth, np.log(rates))[: lowest + 1]
    steepest = int(np.argmin(slope))
    return {
        "lr": rates,
        "loss": list(loss[:finite]),
        "smoothed": smooth,
        "suggestion": rates[steepest] if slope[steepest] < 0 else None,
        "lowest": rates[lowest],
        "diverged": finite < len(loss) or smooth[-1] > _DIVERGED * smooth[lowest],
    }


def described(found: Mapping[str, Any]) -> str:
    """What was found, in a sentence."""
    if found["suggestion"] is None:
        return "the loss fell nowhere between these rates: try others, or look at the data"
    end = f"{'it diverged at' if found['diverged'] else 'it was tried up to'} {found['lr'][-1]:.3g}"
    return (
        f"suggestion: --lr {found['suggestion']:.2g}, where the loss fell most steeply; it was lowest at "
        f"{found['lowest']:.2g}, and {end}"
    )


def draw(found: Mapping[str, Any], config: Config, path: Path) -> None:
    """The loss over the rate, as a PNG. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), dpi=120, layout="constrained")
    axes, smooth = figure.subplots(), found["smoothed"]
    axes.plot(found["lr"], found["loss"], ".", markersize=4, label="loss of a batch")
    axes.plot(found["lr"], smooth, label="smoothed")
    if found["suggestion"] is not None:
        axes.axvline(found["suggestion"], linestyle="--", label=f"suggestion: {found['suggestion']:.2g}")
    low, high = min(smooth), max(smooth[: 1 + len(smooth) // 2])
    margin = 0.3 * (high - low) or 0.1
    title = f"{config.recipe}: {config.model.model}, {config.optim.optimizer}, batch {config.batch_size}"
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss", title=title)
    axes.set(ylim=(low - margin, high + margin))  # what diverges would press the rest flat
    axes.legend(frameon=False)
    figure.savefig(path, format="png")
