"""Configs from plain values, as JSON holds them, and the difference of two."""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal

from lockstep.errors import UserError

_ABSENT = object()


def from_plain(cls: type, values: Any, where: str) -> Any:
    """A dataclass from nested plain values; a UserError names what does not fit. `where` says whose values they are."""
    if not isinstance(values, dict):
        raise UserError(f"{where} is {values!r}, not a group of entries", "Was config.json edited?")
    hints = typing.get_type_hints(cls)
    if strange := set(values) - set(hints):
        raise UserError(
            f"{where} has unknown entries: {', '.join(sorted(map(str, strange)))}", "Was it written by a newer version?"
        )
    return cls(**{name: _plain(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _plain(hint: Any, value: Any, where: str) -> Any:
    """A value from JSON as a field of this type: lists become tuples, whole numbers may stand for floats."""
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_plain(args[0], item, where) for item in value)
    if origin is not tuple and _fits(hint, value):
        return value
    raise UserError(f"{where} is {value!r}", f"It takes {_described(hint)}; was config.json edited?")


def _fits(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if args := typing.get_args(hint):  # a union
        return any(_fits(arg, value) for arg in args)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _described(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if typing.get_origin(hint) is tuple:
        return "a list"
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    return names.get(hint) or " or ".join(_described(arg) for arg in typing.get_args(hint))


def diff_configs(
    saved: Mapping[str, Any], now: Mapping[str, Any], ignore: Collection[str] = ("execution",)
) -> list[str]:
    """What differs between two nested configs, as lines `optim.lr: 0.1 -> 0.2`.

    `ignore` names entries or groups that may differ, by their whole path (`optim.lr`, `execution`) or its last name,
    also as a flag spells it (`lr`, `--batch-size`).
    """
    free = {name.removeprefix("--").replace("-", "_") for name in ignore}
    return [
        f"{_text(path)}: {one} -> {other}" for path, one, other in differences(saved, now) if not _covers(free, path)
    ]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What differs between two nested groups of plain values: the path of an entry, as optim.lr, and both values."""
    before, after = _flat(one), _flat(other)
    return [
        (path, _printed(before.get(path, _ABSENT)), _printed(after.get(path, _ABSENT)))
        for path in [*before, *(path for path in after if path not in before)]
        if before.get(path, _ABSENT) != after.get(path, _ABSENT)
    ]


def _covers(free: set[str], path: str) -> bool:
    names = path.split(".")
    return names[-1] in free or any(".".join(names[:n]) in free for n in range(1, len(names) + 1))


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{before}{name}"
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{path}."))
        else:
            flat[path] = list(value) if isinstance(value, tuple) else value
    return flat


def _printed(value: Any) -> str:
    return "(none)" if value is _ABSENT else repr(value) if value == "" else _text(str(value))


def _text(text: str) -> str:
    """On one line, whatever a forged file holds."""
    return text if text.isprintable() else repr(text)
