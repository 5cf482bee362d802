"""Layers that are not trained: which ones a name means, and what is done about them.

What is not trained requires no gradient: no backward pass, no communication, no optimizer state.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import nn

from lockstep.config import ModelConfig
from lockstep.errors import UserError, unknown
from lockstep.parallel.batchnorm import batch_norms


def freeze(model: nn.Module, config: ModelConfig) -> list[str]:
    """Take out of the training what `--freeze` and `--freeze-until` name; returns a line on it for the run's start.

    Before the model is spread over ranks. What a model itself has frozen stays as it is. Batch norms that train nothing
    are in evaluation mode, and so keep their statistics.

    Raises:
        UserError: for a name that nothing answers to, and where nothing is left to be trained.
    """
    if not (config.freeze or config.freeze_until):
        return []
    names: dict[nn.Parameter, list[str]] = {}  # what the model would train, in its order; tied ones have several names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    is_frozen = _is_frozen(model, config)
    frozen = [parameter for parameter, each in names.items() if any(map(is_frozen, each))]
    if len(frozen) == len(names):
        flags = {"--freeze": ",".join(config.freeze), "--freeze-until": config.freeze_until}
        raise UserError(
            f"{' '.join(f'{flag} {value}' for flag, value in flags.items() if value)} leaves nothing of "
            f"{type(model).__name__} to train",
            f"Leave out its last layer, {next(reversed(names.values()), ['?'])[0].rpartition('.')[0]}.",
        )
    norms, layers = 0, set(batch_norms(model))
    for name, layer in model.named_modules():
        if layer in layers:
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            if set(own) <= set(frozen) if own else is_frozen(name):  # by its own name where it trains nothing
                layer.eval()
                norms += 1
    for parameter in frozen:
        parameter.requires_grad_(False)
    sizes = [p.numel() for p in model.parameters()]
    return [
        f"frozen: {len(frozen)} of {len(sizes)} parameters ({sum(p.numel() for p in frozen):,} of {sum(sizes):,} "
        f"numbers){f', and {norms} batch norm(s) keep their statistics' if norms else ''}"
    ]


def _prefixes(name: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _matches(name: str, pattern: str) -> bool:
    """Whether a parameter's or module's name is what a pattern means, or something inside of that."""
    return any(fnmatchcase(prefix, pattern) for prefix in _prefixes(name))


def _is_frozen(model: nn.Module, config: ModelConfig) -> Callable[[str], bool]:
    """Whether the flags freeze the parameter, or module, of a name. Raises UserError where they name nothing."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    known = list(dict.fromkeys(prefix for name in parameters for prefix in _prefixes(name)))
    for pattern in config.freeze:
        if not any(_matches(name, pattern) for name in known):
            raise unknown("layer in --freeze", pattern, known, "A pattern as 'layer[12]' means what is below too.")
    before: set[str] = set()
    if stage := config.freeze_until:
        if stage not in known:
            raise unknown("layer in --freeze-until", stage, known)
        for names in (parameters, [name for name, _ in model.named_modules()]):
            where = next((i for i, name in enumerate(names) if stage in _prefixes(name)), 0)
            before |= {name for name in names[:where] if not f"{stage}.".startswith(f"{name}.")}
        if not before & set(known):
            raise UserError(f"--freeze-until {stage}: nothing comes before it", "Name a later layer.")
    return lambda name: name in before or any(_matches(name, pattern) for pattern in config.freeze)
