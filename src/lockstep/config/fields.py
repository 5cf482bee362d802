"""The fields of a config: what each takes, how it is read, checked and written, and its help. All reads this table.

A field's type and docstring are the flag's; what they can't say stands in an `Arg`. Names of fields are unique in a
config and the groups inside it.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import re
import textwrap
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lockstep.errors import UserError, unknown

Ints = tuple[int, ...]
Floats = tuple[float, ...]
Names = tuple[str, ...]

_NOUNS = {int: "a whole number", float: "a number", str: "a name", bool: "true or false"}
_ABSENT = object()


@dataclass(frozen=True)
class Arg:
    """What a flag needs beside its field's type and docstring."""

    metavar: str = ""
    unset: str = ""  # what the help says in place of an empty default
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf  # a number is more than this
    below: float = math.inf
    form: str = ""  # a regular expression that a text has to match
    takes: str = ""  # the same in words
    same: tuple[tuple[str, Any], ...] = ()  # words that stand for a value
    words: bool = False  # several values with spaces between them: all up to the next flag
    flag: bool = True  # False: an entry of files alone

    @property
    def bounds(self) -> str:
        """The bounds in words: 0 or more, less than 1."""
        parts = {"at least": self.least, "more than": self.above, "at most": self.most, "less than": self.below}
        return ", ".join(f"{words} {bound:,}" for words, bound in parts.items() if math.isfinite(bound))


Count = Annotated[int, Arg(least=0)]
Positive = Annotated[int, Arg(least=1)]
Part = Annotated[float, Arg(least=0, most=1)]


@dataclass(frozen=True)
class Flag:
    """A field as the command line, config files and checks see it."""

    owner: type  # the dataclass that has the field
    field: str
    group: str  # the field of the config around it that holds that dataclass; empty: it is the outermost
    kind: type | None  # of the value, or of each of several; None: it is one of the choices
    many: bool
    choices: tuple[str, ...]
    arg: Arg
    default: Any

    @property
    def name(self) -> str:
        """Its first name, as --batch-size."""
        return f"--{self.field.replace('_', '-')}"

    @property
    def names(self) -> tuple[str, ...]:
        """All its names: a switch has two."""
        return (self.name, f"--no-{self.name[2:]}") if self.kind is bool else (self.name,)

    @property
    def takes(self) -> str:
        """What it takes beside its choices, in words; a switch takes nothing."""
        if self.arg.takes or self.kind is None or self.kind is bool:
            return self.arg.takes
        between = f"s with {'spaces' if self.arg.words else 'commas'} between them"
        return f"{_NOUNS[self.kind].removeprefix('a ')}{between}" if self.many else _NOUNS[self.kind]

    @property
    def help(self) -> str:
        """The docstring below the field."""
        return _docstrings(self.owner).get(self.field, "")

    def read(self, text: str) -> Any:
        """The value that a text on the command line means. Raises UserError where the flag does not take it."""
        as_it_is = (
            self.arg.words or text in self.choices or text.lower() in (*dict(self.arg.same), self.arg.unset or None)
        )
        if as_it_is or self.kind is None:
            return self.checked(text)
        try:
            parts = [self.kind(part) for part in (split_commas(text) if self.many else [text])]
        except ValueError as error:
            raise self._refused(text) from error
        return self.checked(tuple(parts) if self.many else parts[0])

    def checked(self, value: Any) -> Any:
        """The value as the field holds it. Raises UserError for one that it does not take."""
        if isinstance(value, str) and value.lower() == self.arg.unset == "none":  # as its help has it
            return self.default
        if isinstance(value, str):
            value = split_spaces(value) if self.arg.words else dict(self.arg.same).get(value.lower(), value)
        if self.many:
            if not isinstance(value, list | tuple):
                raise self._refused(value)
            value = tuple(value)
        for each in value if self.many else (value,):
            if not (isinstance(each, str) and each in self.choices):
                self._check(each)
        return value

    def _check(self, value: Any) -> None:
        kinds = (int, float) if self.kind is float else self.kind
        if kinds is None or not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self._refused(value)
        if isinstance(value, int | float):
            if not -math.inf < value < math.inf:
                raise UserError(f"{self.name} {value} is not a finite number", "Give a number.")
            small = value < self.arg.least or value <= self.arg.above
            if small or value > self.arg.most or value >= self.arg.below:
                message = f"{self.name} {value} is too {'small' if small else 'large'}"
                raise UserError(message, f"Give {self.arg.bounds}.")
        elif self.arg.form and not re.fullmatch(self.arg.form, str(value)):
            raise self._refused(value)

    def _refused(self, value: Any) -> UserError:
        if self.kind is None and isinstance(value, str):
            error = unknown(self.name[2:], value, self.choices)
            near = "" if error.remedy.startswith("Known:") else error.remedy  # which would be the same list
            return UserError(error.message, f"{near} {self.name} takes {', '.join(self.choices)}.".strip())
        takes = " or ".join(filter(None, [self.takes or _NOUNS.get(self.kind or str, ""), *self.choices]))
        shown = value if isinstance(value, str) and value and value.isprintable() else repr(value)
        return UserError(f"{self.name} {shown} is not {takes}", f"Give {takes}.")

    def text(self, value: Any) -> str:
        """A value as it is typed."""
        return (" " if self.arg.words else ",").join(map(str, value)) if isinstance(value, tuple) else str(value)

    def words(self, value: Any) -> list[str]:
        """The flag and a value as words of a command; one word where the value alone would be taken for a flag."""
        if isinstance(value, bool):
            return [self.names[0 if value else 1]]
        text = self.text(value)
        if self.arg.words and value:
            return [self.name, *value]
        return [f"{self.name}={text}"] if text[:1] in ("", "-") else [self.name, text]

    def plainly(self, value: Any) -> str:
        """A value for a sentence: 0.1, not 0.10000000000000001."""
        values = value if self.many else (value,)
        return self.text(tuple(f"{each:g}" if isinstance(each, float) else each for each in values))

    def shown(self, value: Any) -> str:
        """The flag and a value for a sentence."""
        if isinstance(value, bool):
            return self.words(value)[0]
        word = next((word for word, same in self.arg.same if same == value), "")
        return f"no {self.name}" if value in ("", ()) and not word else f"{self.name} {word or self.plainly(value)}"


def split_commas(text: str) -> tuple[str, ...]:
    """The parts of `a,b,c`, without spaces around them and without empty ones."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_spaces(text: str) -> tuple[str, ...]:
    """The parts of `a:1,2 b`. A space after a comma, a bracket or an equals sign parts nothing."""
    return tuple(re.sub(r"([,(\[=])\s+", r"\1", text).split())


def flags_of(config: object) -> dict[str, Flag]:
    """The flags of a config, or its class, and of those inside it, by field.

    `field(metadata={"hidden": names})` of a config inside: its fields of these names are no flags.
    """
    return _table(config if isinstance(config, type) else type(config))


def flag_names(config: object) -> dict[str, Flag]:
    """The flags by each of their names."""
    return {name: flag for flag in flags_of(config).values() if flag.arg.flag for name in flag.names}


@functools.cache
def _table(cls: type) -> dict[str, Flag]:
    return {flag.field: flag for flag in _flags(cls, "", frozenset())}


def _flags(cls: Any, group: str, hidden: frozenset[str]) -> Iterator[Flag]:
    hints = typing.get_type_hints(cls, include_extras=True)
    for item in dataclasses.fields(cls):
        hint, arg = hints[item.name], Arg()
        if typing.get_origin(hint) is Annotated:
            hint, arg = typing.get_args(hint)[:2]
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        flag = functools.partial(Flag, cls, item.name, group, arg=arg, default=item.default)
        if item.name in hidden:
            continue
        if dataclasses.is_dataclass(hint):
            yield from _flags(hint, item.name, hidden | set(item.metadata.get("hidden", ())))
        elif origin is Literal:
            yield flag(None, False, parts)
        elif origin is tuple:
            yield flag(parts[0], True, ())
        else:  # a type, or one and some words: int | Literal["auto"]
            kind, *others = parts or (hint,)
            yield flag(kind, False, (*itertools.chain(*map(typing.get_args, others)),))


@functools.cache
def _docstrings(cls: type) -> dict[str, str]:
    """Field -> the docstring below it, of a class and those that it inherits from."""
    found: dict[str, str] = {}
    for each in (each for each in reversed(cls.__mro__) if hasattr(each, "__dataclass_fields__")):
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]).body
        for field, below in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return found


def check_fields(group: Any) -> None:
    """Check each field of a config by its type and `Arg`; lists become tuples. Raises UserError."""
    for name, flag in flags_of(group).items():
        if not flag.group:
            object.__setattr__(group, name, flag.checked(getattr(group, name)))


def require(condition: object, message: str, remedy: str = "") -> None:
    """Raise UserError where the condition does not hold."""
    if not condition:
        raise UserError(message, remedy)


def values_of(config: Any) -> dict[str, Any]:
    """The values of a config and of those inside it, by field."""
    own, inside = {}, dict[str, Any]()
    for item in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, item.name)):
            hidden = item.metadata.get("hidden", ())
            inside |= {name: each for name, each in values_of(value).items() if name not in hidden}
        else:
            own[item.name] = value
    return inside | own


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """The config with other values of some fields, its own or those of a config inside it."""
    changed: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        if dataclasses.is_dataclass(before := getattr(config, item.name)):
            hidden = item.metadata.get("hidden", ())
            after = with_values(before, {name: value for name, value in values.items() if name not in hidden})
            changed |= {item.name: after} if after is not before else {}
        elif item.name in values:
            changed[item.name] = values[item.name]
    return dataclasses.replace(config, **changed) if changed else config


def diff_configs(
    saved: Mapping[str, Any], now: Mapping[str, Any], ignore: Collection[str] = ("execution",)
) -> list[str]:
    """What differs between two nested configs, as lines `optim.lr: 0.1 -> 0.2`.

    `ignore` names entries or groups that may differ, by their whole path (`optim.lr`, `execution`) or its last name,
    also as a flag spells it (`lr`, `--batch-size`).
    """
    free = {name.removeprefix("--").replace("-", "_") for name in ignore}
    lines = []
    for path, one, other in differences(saved, now):
        names = path.split(".")
        if names[-1] not in free and not any(".".join(names[: n + 1]) in free for n in range(len(names))):
            lines.append(f"{_on_one_line(path)}: {one} -> {other}")
    return lines


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What differs between two nested groups of plain values: the path of an entry, as optim.lr, and both values."""
    before, after = flattened(one), flattened(other)
    return [
        (path, printed(before.get(path, _ABSENT)), printed(after.get(path, _ABSENT)))
        for path in [*before, *(path for path in after if path not in before)]
        if before.get(path, _ABSENT) != after.get(path, _ABSENT)
    ]


def flattened(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested groups of plain values as one, by path: optim.lr."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{before}{name}."))
        else:
            flat[f"{before}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat


def printed(value: Any) -> str:
    """A value of `flattened` on one line, whatever a forged file holds."""
    return "(none)" if value is _ABSENT else repr(value) if value == "" else _on_one_line(str(value))


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)
