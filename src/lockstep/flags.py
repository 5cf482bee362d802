"""The command line's words: which flags a config has, what stands beside them, and a config written as flags."""

import dataclasses
import shlex
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tyro.conf import Fixed

from lockstep.errors import UserError, unknown

_FIXED = typing.get_args(Fixed[str])[1]


@dataclass(frozen=True)
class Flag:
    """A flag as typed, and the words that it takes."""

    name: str
    takes_value: bool
    choices: tuple[str, ...] = ()  # empty: anything of the right type


def known_flags(cls: type) -> dict[str, Flag]:
    """Every flag of a config class and of those inside it, aliases and --no- forms included, by its name."""
    return {flag.name: flag for flag in _flags(cls)}


def _flags(cls: type) -> Iterator[Flag]:
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        extras: tuple[Any, ...] = ()
        if typing.get_origin(hint) is typing.Annotated:
            hint, *extras = typing.get_args(hint)  # type: ignore[assignment]
        word = f"--{name.replace('_', '-')}"
        if dataclasses.is_dataclass(hint):
            yield from _flags(hint)  # type: ignore[arg-type]
        elif hint is bool:
            yield from (Flag(word, False), Flag(f"--no-{word.removeprefix('--')}", False))
        elif _FIXED not in extras:
            choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
            aliases = [alias for extra in extras for alias in getattr(extra, "aliases", None) or ()]
            yield from (Flag(each, True, choices) for each in (word, *aliases))


def sort_words(words: Sequence[str], cls: type) -> tuple[list[str], list[str]]:
    """The words that belong to no flag, and the flags with their values, each in order.

    Raises:
        UserError: for an unknown flag, one without its value, or a value that is none of its choices.
    """
    flags = known_flags(cls)
    free, rest = [], []
    queue = iter(words)
    for word in queue:
        if not word.startswith("-"):
            free.append(word)
            continue
        rest.append(word)
        if word in ("-h", "--help"):
            continue
        typed, equals, given = word.partition("=")
        flag = flags.get(typed.replace("_", "-"))
        if flag is None:
            raise unknown("flag", typed, flags, "`--help` lists them.")
        value: str | None = given
        if flag.takes_value and not equals:
            value = next(queue, None)
            if value is None:
                raise UserError(f"{typed} stands at the end without its value", f"Give it as {typed} VALUE.")
            rest.append(value)
        if flag.choices and value not in flag.choices:
            error = unknown(typed.removeprefix("--"), str(value), flag.choices)
            raise UserError(error.message, f"{error.remedy} {typed} takes {', '.join(flag.choices)}.".strip())
    return free, rest


def as_command(command: str, config: Any) -> str:
    """A config as a command for the shell, one flag a line, that gives this config again. Empty values are left out."""
    return " \\\n".join([command, *(f"  {shlex.join(words)}" for words in _as_words(config))])


def _as_words(config: Any) -> Iterator[list[str]]:
    hints = typing.get_type_hints(type(config), include_extras=True)
    for item in dataclasses.fields(config):
        value, flag = getattr(config, item.name), item.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _as_words(value)
        elif isinstance(value, bool):
            yield [f"--{flag}" if value else f"--no-{flag}"]
        elif _FIXED not in typing.get_args(hints[item.name]) and value not in ("", ()):
            yield [f"--{flag}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
