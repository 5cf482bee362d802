"""Layers that are not trained, for good or until an epoch: which ones a name means, and what is done about them.

What is never trained requires no gradient: no backward pass, no communication, no optimizer state. What will be trained
later is a part of every backward pass from the start, and its gradient is thrown away until then: so DDP's buckets, the
optimizer's groups and the memory of a step are the same in the whole run, which can be stopped and resumed anywhere.
The cost is that the epochs before take as long as those after.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from lockstep.config import ModelConfig
from lockstep.errors import UserError, unknown
from lockstep.parallel.batchnorm import batch_norms


@dataclass(frozen=True)
class Freezing:
    """Name -> so many epochs have to be over before it is trained; infinity: it never is."""

    parameters: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)  # batch normalisations, which keep their statistics

    def enter(self, model: nn.Module, epoch: int) -> list[nn.Parameter]:
        """Set batch norms' modes for an epoch, counted from 0; the parameters whose gradients are not used in it."""
        for name, layer in model.named_modules() if self.norms else ():
            if name in self.norms:
                layer.training = self.norms[name] <= epoch
        if not self.parameters:
            return []
        return [p for name, p in model.named_parameters() if p.requires_grad and self.parameters.get(name, 0) > epoch]

    def lines(self, model: nn.Module) -> list[str]:
        """What is frozen, by count, and from when on it is trained; nothing where all is trained."""
        if not self.parameters:
            return []
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        norms = f", and {len(self.norms)} batch norm(s) keep their statistics" if self.norms else ""
        found = [
            f"frozen: {len(self.parameters)} of {len(sizes)} parameters "
            f"({sum(sizes[name] for name in self.parameters):,} of {sum(sizes.values()):,} numbers){norms}"
        ]
        for epochs in sorted({epochs for epochs in self.parameters.values() if math.isfinite(epochs)}):
            names = [name for name, from_then in self.parameters.items() if from_then == epochs]
            amount = f"{sum(sizes[name] for name in names):,} numbers"
            found.append(
                f"trained after {epochs} epoch(s): {len(names)} of them ({amount}), {names[0]} ... {names[-1]}"
            )
        return found


def freeze(model: nn.Module, config: ModelConfig) -> Freezing:
    """Take out of the training what `--freeze` and `--freeze-until` name, as far as `--unfreeze-at` has no part in it.

    Before the model is spread over ranks. What a model itself has frozen stays as it is.

    Raises:
        UserError: for a name that nothing answers to, and where nothing is left to be trained.
    """
    if not (config.freeze or config.freeze_until):
        return Freezing()
    names: dict[int, list[str]] = {}  # of each parameter that the model would train, in its order; tied ones have more
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    known = _known(model)
    frozen = _frozen(model, config, known)
    starts = {each[0]: math.inf for each in names.values() if any(map(frozen, each))}
    layers = {name: module for name, module in model.named_modules() if module in set(batch_norms(model))}
    norms = {name: math.inf for name, layer in layers.items() if _is_frozen(name, layer, starts, frozen)}
    for epochs, pattern in config.unfreezing:
        thawed = [each[0] for each in names.values() if any(_matches(name, pattern) for name in each)]
        if not (found := [name for name in thawed if math.isinf(starts.get(name, 0))]):
            if not thawed and pattern not in known:
                raise unknown("layer in --unfreeze-at", pattern, known, "Or `all`.")
            raise UserError(
                f"--unfreeze-at {epochs}:{pattern}: nothing of it is frozen then",
                "Freeze it by --freeze, or leave it out.",
            )
        starts |= dict.fromkeys(found, epochs)
        norms |= {name: epochs for name in norms if math.isinf(norms[name]) and _matches(name, pattern)}
    if len([name for name, start in starts.items() if start]) == len(names):
        raise UserError(
            f"{_flags(config)} leaves nothing of {type(model).__name__} to train in the first epoch",
            f"Leave out its last layer, {next(reversed(names.values()), ['?'])[0].rpartition('.')[0]}.",
        )
    for parameter in model.parameters():
        if math.isinf(starts.get(names.get(id(parameter), [""])[0], 0)):
            parameter.requires_grad_(False)
    return Freezing(starts, norms)


def _flags(config: ModelConfig) -> str:
    flags = {"--freeze": ",".join(config.freeze), "--freeze-until": config.freeze_until}
    return " ".join(f"{flag} {value}" for flag, value in flags.items() if value)


def _known(model: nn.Module) -> list[str]:
    """The names of modules that hold parameters, and of parameters, in the model's order."""
    found: dict[str, None] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        found |= dict.fromkeys(_prefixes(name))
    return list(found)


def _prefixes(name: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _matches(name: str, pattern: str) -> bool:
    """Whether a parameter's or module's name is what a pattern means, or something inside of that."""
    return pattern == "all" or any(fnmatchcase(prefix, pattern) for prefix in _prefixes(name))


def _frozen(model: nn.Module, config: ModelConfig, known: list[str]) -> Callable[[str], bool]:
    """Whether the flags freeze the parameter, or module, of a name. Raises UserError where they name nothing."""
    for pattern in config.freeze:
        if not any(_matches(name, pattern) for name in known):
            raise unknown("layer in --freeze", pattern, known, "A pattern as 'layer[12]' means what is below too.")
    before: set[str] = set()
    if stage := config.freeze_until:
        if stage not in known:
            raise unknown("layer in --freeze-until", stage, known)
        for names in (
            [n for n, _ in model.named_parameters(remove_duplicate=False)],
            [n for n, _ in model.named_modules()],
        ):
            where = next((i for i, name in enumerate(names) if stage in _prefixes(name)), 0)
            before |= {name for name in names[:where] if not f"{stage}.".startswith(f"{name}.")}
        if not before & set(known):
            raise UserError(f"--freeze-until {stage}: nothing comes before it", "Name a later layer.")
    return lambda name: name in before or any(_matches(name, pattern) for pattern in config.freeze)


def _is_frozen(name: str, layer: nn.Module, starts: Mapping[str, float], frozen: Callable[[str], bool]) -> bool:
    """Whether a batch norm is: with all that it would train, or by its own name where it trains nothing."""
    own = [f"{name}.{each}" if name else each for each, p in layer.named_parameters(recurse=False) if p.requires_grad]
    return all(each in starts for each in own) if own else frozen(name)
