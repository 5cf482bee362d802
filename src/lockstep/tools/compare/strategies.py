"""The strategies of a comparison, as they are written on the command line: ddp, ddp+bf16+accumulate4, exact8."""

import re
import typing
from dataclasses import dataclass, replace
from typing import Any

from lockstep import config as configs
from lockstep.config import Config
from lockstep.errors import UserError, unknown

BASES: tuple[str, ...] = typing.get_args(configs.Strategy)
ONE_PROCESS = ("single", "dp")
_PRECISIONS = ("bf16", "fp16", "tf32")
_SWITCHES = {"syncbn": "sync_bn", "compile": "compile", "channels_last": "channels_last"}
_GRAMMAR = "A strategy is BASE+MODIFIER+..., as ddp+bf16+accumulate4; see `lockstep compare --help`."


@dataclass(frozen=True)
class Strategy:
    """One way to train. What a modifier does not set stays as the config has it."""

    base: str = "ddp"  # of config.Strategy
    shards: int = 0  # exact mode
    precision: str = ""
    accumulate: int = 0
    switches: tuple[str, ...] = ()  # fields of ModelConfig to turn on, in the order of _SWITCHES

    @property
    def name(self) -> str:
        """As on the command line, modifiers in a fixed order."""
        words = [f"exact{self.shards}" if self.shards else self.base]
        words += [self.precision] if self.precision else []
        words += [f"accumulate{self.accumulate}"] if self.accumulate else []
        return "+".join([*words, *(word for word, field in _SWITCHES.items() if field in self.switches)])

    def applied(self, config: Config) -> Config:
        """The config with what the strategy says of the experiment. Raises UserError where they don't go together."""
        model: dict[str, Any] = dict.fromkeys(self.switches, True)
        chosen: dict[str, Any] = {
            "shards": self.shards or config.shards,
            "precision": self.precision or config.precision,
            "accumulate": self.accumulate or config.accumulate,
        }
        return replace(config, **chosen, model=replace(config.model, **model))


def parse(text: str) -> Strategy:
    """The strategy that a text names. Raises UserError, with the nearest known names."""
    base, *modifiers = text.split("+")
    shards = _numbered("exact", base)
    if not shards and base not in BASES:
        raise unknown("strategy", base, [*BASES, "exact8"], _GRAMMAR)
    precisions = [word for word in modifiers if word in _PRECISIONS]
    counts = {word: count for word in modifiers if (count := _numbered("accumulate", word))}
    switches = [word for word in modifiers if word in _SWITCHES]
    for word in modifiers:
        if word not in (*precisions, *counts, *switches):
            raise unknown("modifier", word, [*_PRECISIONS, "accumulate4", *_SWITCHES], f"In {text}. {_GRAMMAR}")
    for named in (precisions, [word for word in modifiers if word in counts]):
        if len(named) > 1:
            raise UserError(f"--strategies {text}: {' and '.join(named)} at once", "Leave one of them out.")
    if twice := [word for word in _SWITCHES if switches.count(word) > 1]:
        raise UserError(f"--strategies {text}: {twice[0]} stands there twice", "Leave one of them out.")
    return Strategy(
        base="ddp" if shards else base,
        shards=shards,
        precision=precisions[0] if precisions else "",
        accumulate=next(iter(counts.values()), 0),
        switches=tuple(field for word, field in _SWITCHES.items() if word in switches),
    )


def _numbered(word: str, text: str) -> int:
    """K of `wordK`; 0 where the text is another word. Raises UserError where the number is missing or 0."""
    found = re.fullmatch(rf"{word}([0-9]*)", text)
    if found is None:
        return 0
    if not (count := int(found[1] or 0)):
        what = "shards, as exact8" if word == "exact" else "micro-batches, as accumulate4"
        raise UserError(f"--strategies: {text} without its number", f"Give the number of {what}.")
    return count
