"""The axes of the matrix of combinations, and which of them a config takes together."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery
from lockstep.errors import UserError
from tests.matrix_nets import BATCH, EPOCHS, ROUND

Choice = tuple[str, Any]  # an axis and a value on it, which is not its default
_NETS = "tests.matrix_nets"

# path of the field in a config -> values beside its default
AXES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp16", "tf32"),
    "on_nonfinite": ("skip", "rollback"),
    "execution.strategy": ("fsdp",),
    "comm.compress": ("fp16", "bf16"),
    "optim.ema": (0.7,),
    "optim.ema_warmup": (True,),
    "optim.clip_norm": (0.3,),
    "optim.optimizer": ("adamw", "timm:muon"),
    "optim.scale_lr": ("sqrt",),
    "accumulate": (2, 3),
    "model.find_unused_parameters": (True,),
    "model.compile": (True,),
    "model.batch_norm": ("global", "local", "groups:2"),
    "model.channels_last": (True,),
    "model.activation_checkpointing": (True,),
    "model.freeze": (("*.bias",),),
    "optim.layer_decay": (0.5,),
    "exact": (4,),
    "data.augment": (("randaugment:2,9", "gaussianblur:3,p=0.5"),),
    "samples.mixup": (0.4,),
    "samples.cutmix": (1.0,),
    "tta": ("mirror",),
    "execution.law": ("off", "strict"),
    "execution.loader": ("streaming",),
    "bad": (True,),  # an infinite image in an awkward step
}

BASE = Config(
    batch_size=BATCH,
    epochs=EPOCHS,
    data=DataConfig(dataset=f"{_NETS}:good"),
    model=ModelConfig(model=f"{_NETS}:net64"),
    optim=OptimConfig(lr=0.05, schedule="constant", base_batch_size=4),
    execution=Execution(device="cpu", threads=1, workers=1, loader="resident", log_every=2, eval_batch_size=16),
    recovery=Recovery(checkpoint_every=f"{2 * ROUND}steps", check_every=ROUND, hang_timeout=120),
)


@dataclass(frozen=True)
class Combination:
    """Values on some axes, all others at their defaults."""

    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.choices)

    def config(self) -> Config:
        """The run. Raises UserError where it is refused."""
        chosen = dict(self.choices)
        unused = "_unused" if chosen.get("model.find_unused_parameters") else ""
        # in float64 N may change nothing but its rounding; autocast would leave float64 as it is
        net = "net64" if chosen.get("precision", "fp32") == "fp32" else "net32"
        fields: dict[str, dict[str, Any]] = {"": {}, "model": {"model": f"{_NETS}:{net}{unused}"}}
        if "data.augment" in chosen:
            fields["data"] = {"dataset": f"{_NETS}:stored"}
        if chosen.pop("bad", False):
            fields["data"] = {"dataset": f"{_NETS}:bad"}
        for path, value in chosen.items():
            part, _, name = path.rpartition(".")
            fields.setdefault(part, {})[name] = value
        changed = {part: replace(getattr(BASE, part), **values) for part, values in fields.items() if part}
        return replace(BASE, **fields[""], **changed)

    def refusal(self) -> str:
        """The sentence of the config, or nothing."""
        try:
            self.config()
        except UserError as error:
            return str(error)
        return ""


def pairs() -> list[Combination]:
    """Every pair of values on two axes."""
    return [Combination(both) for both in _products(2)]


def _products(count: int) -> Iterator[tuple[Choice, ...]]:
    for names in itertools.combinations(AXES, count):
        yield from itertools.product(*([(name, value) for value in AXES[name]] for name in names))


def several(seed: int, count: int) -> Iterator[Combination]:
    """Random combinations of so many axes, of which no two are refused together."""
    drawn = random.Random(f"{seed} {count}")
    while True:
        choices: list[Choice] = []
        names = list(AXES)
        drawn.shuffle(names)
        for name in names:
            choice = name, drawn.choice(AXES[name])
            if len(choices) < count and not Combination((*choices, choice)).refusal():
                choices.append(choice)
        yield Combination(tuple(sorted(choices)))


Say = Callable[[str], None]
