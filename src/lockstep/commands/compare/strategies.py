"""The strategies of a comparison, as they are written on the command line: ddp, ddp+bf16+accumulate4, exact8."""

import re
import typing
from dataclasses import dataclass, replace
from typing import Any

from lockstep import config as configs
from lockstep.config import Config, LinkConfig
from lockstep.errors import UserError, unknown

BASES: tuple[str, ...] = typing.get_args(configs.Strategy)
ONE_PROCESS = ("single", "dp")
_PRECISIONS = ("bf16", "fp16", "tf32")
_COMPRESSIONS = {"fp16grads": "fp16", "bf16grads": "bf16"}  # beside powersgd4
_LINKS = ("powersgd", "local", "diloco")  # each with a number; they and _COMPRESSIONS exclude each other
_SWITCHES = {"syncbn": "sync_bn", "compile": "compile", "channels_last": "channels_last"}
_COUNTED = {
    "exact": "the number of slices, as exact8",
    "accumulate": "the number of micro-batches, as accumulate4",
    "powersgd": "the rank of what is sent, as powersgd4",
    "local": "the steps between two averagings, as local8",
    "diloco": "the steps between two outer steps, as diloco8",
    "stages": "the number of stages, as stages2",
}
_NUMBERED = tuple(word for word in _COUNTED if word != "exact")
_GRAMMAR = "A strategy is BASE+MODIFIER+..., as ddp+bf16+accumulate4; see `lockstep compare --help`."


@dataclass(frozen=True)
class Strategy:
    """One way to train. What a modifier does not set stays as the config has it."""

    base: str = "ddp"  # of config.Strategy
    exact: int = 0  # exact mode
    precision: str = ""
    accumulate: int = 0
    compress: str = ""  # of config.LinkConfig
    local: int = 0  # steps between two averagings of weights
    diloco: int = 0  # likewise, with DiLoCo's outer step
    stages: int = 0  # of a model over several devices
    switches: tuple[str, ...] = ()  # fields of ModelConfig to turn on, in the order of _SWITCHES

    @property
    def name(self) -> str:
        """As on the command line, modifiers in a fixed order."""
        words = [f"exact{self.exact}" if self.exact else self.base]
        words += [self.precision] if self.precision else []
        words += [f"accumulate{self.accumulate}"] if self.accumulate else []
        if self.compress:
            sent = {value: word for word, value in _COMPRESSIONS.items()}
            words.append(sent.get(self.compress) or self.compress.replace(":", ""))
        words += [f"{word}{k}" for word, k in (("local", self.local), ("diloco", self.diloco)) if k]
        words += [f"stages{self.stages}"] if self.stages else []
        return "+".join([*words, *(word for word, field in _SWITCHES.items() if field in self.switches)])

    def applied(self, config: Config, **changed: Any) -> Config:
        """The config with what the strategy says of the experiment, and with `changed` fields.

        Raises:
            UserError: where they don't go together.
        """
        model: dict[str, Any] = dict.fromkeys(self.switches, True)
        chosen: dict[str, Any] = {
            "exact": self.exact or config.exact,
            "precision": self.precision or config.precision,
            "accumulate": self.accumulate or config.accumulate,
        }
        link = config.link
        if self.compress:
            link = LinkConfig(self.compress)
        elif self.local:
            link = LinkConfig(sync_every=self.local)
        elif self.diloco:
            link = LinkConfig(sync_every=self.diloco, outer_lr=0.7, outer_momentum=0.9)
        return replace(config, **chosen, link=link, model=replace(config.model, **model), **changed)


def parse(text: str) -> Strategy:
    """The strategy that a text names. Raises UserError, with the nearest known names."""
    base, *modifiers = text.split("+")
    exact = _numbered("exact", base)
    if not exact and base not in BASES:
        raise unknown("strategy", base, [*BASES, "exact8"], _GRAMMAR)
    precisions = [word for word in modifiers if word in _PRECISIONS]
    counts = {word: (kind, k) for word in modifiers for kind in _NUMBERED if (k := _numbered(kind, word))}
    switches = [word for word in modifiers if word in _SWITCHES]
    for word in modifiers:
        if word not in (*precisions, *counts, *switches, *_COMPRESSIONS):
            known = [*_PRECISIONS, *_COMPRESSIONS, *(f"{kind}4" for kind in _NUMBERED), *_SWITCHES]
            raise unknown("modifier", word, known, f"In {text}. {_GRAMMAR}")
    by_kind = {kind: [word for word in modifiers if counts.get(word, ("",))[0] == kind] for kind in _NUMBERED}
    linked = [word for word in modifiers if word in _COMPRESSIONS or counts.get(word, ("",))[0] in _LINKS]
    for named in (precisions, linked, by_kind["accumulate"], by_kind["stages"]):
        if len(named) > 1:
            raise UserError(f"--strategies {text}: {' and '.join(named)} at once", "Leave one of them out.")
    if twice := [word for word in _SWITCHES if switches.count(word) > 1]:
        raise UserError(f"--strategies {text}: {twice[0]} stands there twice", "Leave one of them out.")
    numbers = {kind: next((counts[word][1] for word in words), 0) for kind, words in by_kind.items()}
    powersgd = numbers.pop("powersgd")
    compress = next((_COMPRESSIONS[word] for word in linked if word in _COMPRESSIONS), "")
    return Strategy(
        base="ddp" if exact else base,
        exact=exact,
        precision=precisions[0] if precisions else "",
        compress=f"powersgd:{powersgd}" if powersgd else compress,
        switches=tuple(field for word, field in _SWITCHES.items() if word in switches),
        **numbers,
    )


def _numbered(word: str, text: str) -> int:
    """K of `wordK`; 0 where the text is another word. Raises UserError where the number is missing or 0."""
    found = re.fullmatch(rf"{word}([0-9]*)", text)
    if found is None:
        return 0
    if not (count := int(found[1] or 0)):
        raise UserError(f"--strategies: {text} without its number", f"Give {_COUNTED[word]}.")
    return count
