"""The command line: which flags a config has, the arguments beside them, and a config written as flags."""

import dataclasses
import itertools
import shlex
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tyro.conf import Fixed

from lockstep.config import split_commas
from lockstep.config.fields import Several
from lockstep.errors import UserError, unknown

_FIXED = typing.get_args(Fixed[str])[1]
# switches that are short for a flag and its value
SHORT = {"--sync-bn": ("--batch-norm", "global"), "--no-sync-bn": ("--batch-norm", "local")}

# what fingers type from habit -> its name here; `lockstep.errors.SAID` has what is said in other words
HABITS = {
    "-b": "--batch-size", "--bs": "--batch-size", "-j": "--workers", "--num-workers": "--workers",
    "--wd": "--weight-decay", "--opt": "--optimizer", "--sched": "--schedule", "--lr-scheduler": "--schedule",
    "--num-epochs": "--epochs", "--arch": "--model", "-a": "--model", "--output-dir": "--out", "-o": "--out",
    "--smoothing": "--label-smoothing", "--clip-grad": "--clip-norm", "--grad-accum-steps": "--accumulate",
    "--gradient-accumulation-steps": "--accumulate", "--print-freq": "--log-every", "--dist-backend": "--backend",
    "--gpu": "--gpus", "--data-path": "--data-dir", "--root": "--data-dir",
}  # fmt: skip

_AUTO = "--accumulate"  # whose 0 is spelt auto too
_READERS: dict[Any, tuple[Callable[[str], object], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "a name"),
}
_SEVERAL = (), str, "names with spaces between them"


@dataclass(frozen=True)
class Flag:
    """A flag's names, and the values that it takes: one of `choices`, or a text that `read` does not refuse."""

    names: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...] = ()
    read: Callable[[str], object] | None = None
    described: str = ""  # what `read` takes
    several: bool = False  # all values up to the next flag

    def check(self, typed: str, value: str) -> None:
        """Raise UserError for a value that the flag, by the name that was typed, does not take."""
        if value in self.choices:
            return
        if self.read is None:
            error = unknown(typed.removeprefix("--"), value, self.choices)
            raise UserError(error.message, f"{error.remedy} {typed} takes {', '.join(self.choices)}.".strip())
        try:
            self.read(value)
        except ValueError as error:
            others = "".join(f" or {choice}" for choice in self.choices)
            raise UserError(f"{typed} {value}: not {self.described}", f"Give {self.described}{others}.") from error


def hidden_fields(cls: type) -> frozenset[str]:
    """Fields of a command's config that are no flags of the command; `of` gives them their values.

    The field that holds the config names them: `config: Config = field(..., metadata={"hidden": ("nproc",)})`.
    """
    return frozenset(name for item in dataclasses.fields(cls) for name in item.metadata.get("hidden", ()))


def known_flags(cls: type) -> dict[str, Flag]:
    """Every flag of a config class and of those inside it, by each of its names."""
    return {name: flag for flag in flags_of(cls, frozenset()) for name in flag.names}


def flags_of(cls: type, hidden: frozenset[str]) -> Iterator[Flag]:
    """The flags of a config class and of those inside it, but for fields of these names in the latter."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for name in (item.name for item in dataclasses.fields(cls) if item.name not in hidden):
        hint: Any = hints[name]
        extras: list[Any] = []
        if typing.get_origin(hint) is typing.Annotated:
            hint, *extras = typing.get_args(hint)
        flag = name.replace("_", "-")
        if dataclasses.is_dataclass(hint):
            yield from flags_of(hint, hidden | hidden_fields(cls))  # type: ignore[arg-type]
        elif hint is bool:
            yield Flag((f"--{flag}", f"--no-{flag}"), False)
        elif _FIXED not in extras:
            aliases = [alias for extra in extras for alias in getattr(extra, "aliases", None) or ()]
            several = Several() in extras
            yield Flag((f"--{flag}", *aliases), True, *(_SEVERAL if several else _values(hint)), several=several)


def _values(hint: Any) -> tuple[tuple[str, ...], Callable[[str], object] | None, str]:
    """The choices, reader and description of a field's type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return parts, None, ""
    if origin is tuple:
        read, described = _READERS[parts[0]]
        several = f"{described.removeprefix('a ')}s with commas between them"
        return (), lambda text: [read(part) for part in split_commas(text)], several
    if parts:  # a union of a type and choices
        return (*itertools.chain(*(_values(part)[0] for part in parts)),), *_READERS[parts[0]]
    return (), *_READERS[hint]


def split_arguments(arguments: Sequence[str], cls: type) -> tuple[list[str], list[str]]:
    """The positional arguments, and the flags with their values, each in order.

    A flag that takes several values comes last, its values as one.

    Raises:
        UserError: for an unknown flag, one without its value, or a value that it does not take.
    """
    flags = known_flags(cls)
    positional, rest, several = [], [], dict[str, list[str]]()
    queue = deque(word for argument in arguments for word in _long_form(argument, flags))
    while queue:
        argument = queue.popleft()
        if not argument.startswith("-"):
            positional.append(argument)
            continue
        if argument in ("-h", "--help") or argument.startswith("--help="):
            rest.append(argument)
            continue
        typed, equals, value = argument.partition("=")
        flag = flags.get(typed.replace("_", "-")) or flags.get(HABITS.get(typed.replace("_", "-"), ""))
        if flag is None:
            raise unknown("flag", typed, flags, "`--help` lists them.")
        if not flag.takes_value:
            if equals:
                raise UserError(f"{argument}: the flag takes no value", f"Give {typed} or leave it out.")
            rest.append(argument)
            continue
        if not (equals or queue):
            raise UserError(f"{typed} stands at the end without its value", f"Give it as {typed} VALUE.")
        name = typed if typed.replace("_", "-") in flags else flag.names[0]
        words = [f"{name}={value}"] if equals else [name, value := queue.popleft()]
        if value == "auto" and flag.names[0] == _AUTO:
            words, value = [f"{_AUTO}=0"], "0"
        flag.check(typed, value)
        if not flag.several:
            rest += words
            continue
        values = several.setdefault(flag.names[0], [])
        values.append(value)
        while not equals and queue and not queue[0].startswith("-"):
            values.append(queue.popleft())
    return positional, [*rest, *(f"{name}={' '.join(values)}" for name, values in several.items())]


def _long_form(argument: str, flags: Collection[str]) -> tuple[str, ...]:
    """The flag and the value that a switch is short for; anything else as it is."""
    long = SHORT.get(argument.replace("_", "-"), ())
    return long if long and long[0] in flags else (argument,)


def changed_flags(config: Any, usual: Any, hidden: Collection[str] = ()) -> list[list[str]]:
    """The flags that make `config` of `usual`, each with its value; `hidden`: fields that are none."""
    before, after = _as_arguments(usual), _as_arguments(config)
    return [flag for name, flag in after.items() if flag != before[name] and name not in hidden]


def as_command(command: str, config: Any) -> str:
    """A config as a command for the shell, one flag a line, that gives this config again. Empty values are left out."""
    flags = [flag for flag in _as_arguments(config).values() if not flag[0].endswith("=")]
    return " \\\n".join([command, *(f"  {shlex.join(flag)}" for flag in flags)])


def _as_arguments(config: Any) -> dict[str, list[str]]:
    """Each field as a flag and its value; as one argument where the value alone would be taken for none, or a flag."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    arguments: dict[str, list[str]] = {}
    for item in dataclasses.fields(config):
        value, flag = getattr(config, item.name), item.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            arguments |= _as_arguments(value)
        elif isinstance(value, bool):
            arguments[item.name] = [f"--{flag}" if value else f"--no-{flag}"]
        elif _FIXED not in typing.get_args(hints[item.name]):
            if value and Several() in typing.get_args(hints[item.name]):
                arguments[item.name] = [f"--{flag}", *value]
                continue
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            arguments[item.name] = [f"--{flag}={text}"] if text[:1] in ("", "-") else [f"--{flag}", text]
    return arguments
