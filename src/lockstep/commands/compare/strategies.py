"""The strategies of a comparison, as they are written on the command line: ddp, ddp+bf16+accumulate4, exact8."""

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep import config as configs
from lockstep.config import Config, LinkConfig
from lockstep.errors import UserError, unknown

BASES: tuple[str, ...] = typing.get_args(configs.Strategy)
_GRAMMAR = "A strategy is BASE+MODIFIER+..., as ddp+bf16+accumulate4; see `lockstep compare --help`."


class _Modifier(NamedTuple):
    """Which part of the config it changes, how, and what its number is, where it has one."""

    part: str  # "": the config's own fields
    changed: Callable[[int], dict[str, Any]]
    number: str = ""

    @property
    def slot(self) -> str:
        """Modifiers with the same exclude each other."""
        return self.part if self.part == "link" else next(iter(self.changed(1)))


# in the order of a strategy's name; exact stands in the place of the base
_MODIFIERS = {
    "exact": _Modifier("", lambda n: {"exact": n}, "the number of slices, as exact8"),
    "bf16": _Modifier("", lambda _: {"precision": "bf16"}),
    "fp16": _Modifier("", lambda _: {"precision": "fp16"}),
    "tf32": _Modifier("", lambda _: {"precision": "tf32"}),
    "accumulate": _Modifier("", lambda n: {"accumulate": n}, "the number of micro-batches, as accumulate4"),
    "fp16grads": _Modifier("link", lambda _: {"compress": "fp16"}),
    "bf16grads": _Modifier("link", lambda _: {"compress": "bf16"}),
    "powersgd": _Modifier("link", lambda n: {"compress": f"powersgd:{n}"}, "the rank of what is sent, as powersgd4"),
    "local": _Modifier("link", lambda n: {"sync_every": n}, "the steps between two averagings, as local8"),
    "diloco": _Modifier(
        "link",
        lambda n: {"sync_every": n, "outer_lr": 0.7, "outer_momentum": 0.9},
        "the steps between two outer steps, as diloco8",
    ),
    "stages": _Modifier("execution", lambda n: {"model_parallel": n}, "the number of stages, as stages2"),
    "syncbn": _Modifier("model", lambda _: {"batch_norm": "global"}),
    "compile": _Modifier("model", lambda _: {"compile": True}),
    "channels_last": _Modifier("model", lambda _: {"channels_last": True}),
}


@dataclass(frozen=True)
class Strategy:
    """One way to train. What a modifier does not set stays as the config has it."""

    base: str = "ddp"  # of config.Strategy
    modifiers: tuple[tuple[str, int], ...] = ()  # of _MODIFIERS, in their order, each with its number or 0

    @property
    def name(self) -> str:
        """As on the command line, modifiers in a fixed order."""
        names = [f"{kind}{number or ''}" for kind, number in self.modifiers]
        return "+".join(names if dict(self.modifiers).get("exact") else [self.base, *names])

    def applied(self, config: Config, **execution: Any) -> Config:
        """The config trained this way, and with these fields of its execution.

        Raises:
            UserError: for settings that don't go together.
        """
        changed: dict[str, dict[str, Any]] = {"": {}, "execution": {**execution, "strategy": self.base}}
        for kind, number in self.modifiers:
            changed.setdefault(_MODIFIERS[kind].part, {}).update(_MODIFIERS[kind].changed(number))
        parts: dict[str, Any] = changed.pop("")
        for part, values in changed.items():
            parts[part] = LinkConfig(**values) if part == "link" else replace(getattr(config, part), **values)
        return replace(config, **parts)


def parse(text: str) -> Strategy:
    """The strategy that a text names. Raises UserError, with the nearest known names."""
    base, *names = text.split("+")
    exact = None if base in BASES else _read(base)
    if base not in BASES and (exact is None or exact[0] != "exact"):
        raise unknown("strategy", base, [*BASES, "exact8"], _GRAMMAR)
    modifiers, taken = [exact] if exact else [], dict[str, str]()
    for name in names:
        modifier = _read(name)
        if modifier is None or modifier[0] == "exact":
            known = [f"{kind}{'4' if each.number else ''}" for kind, each in _MODIFIERS.items() if kind != "exact"]
            raise unknown("modifier", name, known, f"In {text}. {_GRAMMAR}")
        if other := taken.get(slot := _MODIFIERS[modifier[0]].slot):
            both = f"{name} stands there twice" if other == name else f"{other} and {name} at once"
            raise UserError(f"--strategies {text}: {both}", "Leave one of them out.")
        taken[slot] = name
        modifiers.append(modifier)
    order = list(_MODIFIERS)
    return Strategy("ddp" if exact else base, tuple(sorted(modifiers, key=lambda each: order.index(each[0]))))


def _read(name: str) -> tuple[str, int] | None:
    """A modifier and its number, 0 where it takes none; None for something else.

    Raises:
        UserError: for one whose number is missing or 0.
    """
    kind = name if name in _MODIFIERS else name.rstrip("0123456789")
    if kind not in _MODIFIERS or (kind != name and not _MODIFIERS[kind].number):
        return None
    number = int(name.removeprefix(kind) or 0)
    if _MODIFIERS[kind].number and not number:
        raise UserError(f"--strategies: {name} without its number", f"Give {_MODIFIERS[kind].number}.")
    return kind, number
