"""What `lockstep sweep` takes, and the runs that it makes."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from lockstep.commands.shared.arguments import parse
from lockstep.config import Config, Names
from lockstep.config.fields import require
from lockstep.config.flags import known_flags, split_arguments
from lockstep.errors import UserError, unknown

_NOT_VARIED = ("out", "config", "resume", "override", "node-rank")


@dataclass(frozen=True)
class Variant:
    """One run: its settings beside the seed, its seed, and its config."""

    setting: str  # as lr=0.1 wd=0.01; empty where the seed alone varies
    seed: int
    config: Config

    @property
    def folder(self) -> str:
        """The name of its folder in the sweep's."""
        setting = re.sub(r"[^\w.=+-]+", "_", self.setting)
        return f"{setting}_seed={self.seed}" if setting else f"seed={self.seed}"


@dataclass(frozen=True)
class Plan:
    """What to vary."""

    vary: Names = ()
    """What differs: a flag's name and its values, as --vary lr=0.1,0.2 --vary seed=0,1,2; every combination is run."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("resume", "override")})

    def __post_init__(self) -> None:
        self.values()
        if self.config.execution.nnodes > 1:
            raise UserError("sweep with --nnodes", "It starts the processes of one machine: leave the flag out.")

    def values(self) -> dict[str, list[str]]:
        """The values of each name, in the order that they were given.

        Raises:
            UserError: for a name that no flag has, a value that stands there twice, or nothing to vary.
        """
        found: dict[str, list[str]] = {}
        flags, at = known_flags(Config), ""
        for part in self.vary:
            name, equals, value = part.partition("=")
            if equals:
                at = name.strip().removeprefix("--").replace("_", "-")
                flag = flags.get(f"--{at}")
                if flag is None or at in _NOT_VARIED:
                    names = [flag.removeprefix("--") for flag in flags if flag.removeprefix("--") not in _NOT_VARIED]
                    raise unknown("flag in --vary", at, names, "As --vary lr=0.1,0.2.")
                at = flag.names[0].removeprefix("--")
                require(
                    at not in found, f"--vary {at} stands there twice", "Give its values in one: --vary lr=0.1,0.2."
                )
                found[at] = []
            require(bool(at), f"--vary {part}: the name is missing", "As --vary lr=0.1,0.2.")
            text = (value if equals else part).strip()
            require(text not in found[at], f"--vary {at}: {text} stands there twice", "Leave one of them out.")
            found[at].append(text)
        return found

    def variants(self) -> list[Variant]:
        """Every run; settings in the order of --vary, the seeds of one setting together."""
        values = self.values()
        require(bool(values), "nothing varies", "Say what shall: --vary lr=0.1,0.2 --vary seed=0,1,2.")
        seeds = values.pop("seed", [str(self.config.seed)])
        found = []
        for chosen in itertools.product(*values.values()):
            flags = list(zip(values, chosen, strict=True))
            setting = " ".join(f"{name}={value}" for name, value in flags)
            for seed in seeds:
                config = _with(self.config, [*flags, ("seed", seed)])
                found.append(Variant(setting, config.seed, config))
        names = [variant.folder for variant in found]
        require(len(set(names)) == len(names), "two of the runs would have one folder", "Give other values.")
        return found


def _with(config: Config, flags: Sequence[tuple[str, str]]) -> Config:
    """The config with some flags, checked as the command line checks them."""
    words = [word for name, value in flags for word in _words(name, value)]
    _, rest = split_arguments(words, Config)
    made: Config = parse(Config, config, rest, "lockstep sweep", "")
    return replace(made, recipe=config.recipe)


def _words(name: str, value: str) -> Iterator[str]:
    if known_flags(Config)[f"--{name}"].takes_value:
        yield f"--{name}={value}"
        return
    require(value in ("true", "false"), f"--vary {name}={value}: the flag takes no value", f"As {name}=true,false.")
    yield f"--{name}" if value == "true" else f"--no-{name}"
