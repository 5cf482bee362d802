"""Every command and every flag: its names, what it takes, its default, and its help, from the config's classes."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from typing import Any

from docs.from_code import code, escaped, table
from docs.from_code.chinese import translated
from tests.config.frozen import parsers

from lockstep.cli import COMMANDS
from lockstep.config import Config
from lockstep.config.flags import Flag, hidden_fields, known_flags

HEADS = {"en": ["flag", "takes", "default", "what it does"], "zh": ["参数", "取值", "默认", "作用"]}
WORDS = {
    "en": {
        "also": "And these flags of `lockstep train`",
        "all": "And the flags of `lockstep train`, [listed there](#lockstep-train)",
        "but": "without",
    },
    "zh": {
        "also": "另有 `lockstep train` 的这些参数",
        "all": "另有 `lockstep train` 的参数，见[那一节](#lockstep-train)",
        "but": "除去",
    },
}


def docstrings(cls: type) -> dict[str, str]:
    """By field the text below it; of a base class too."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = str(text.value.value)
    return found


def default_of(value: object, hint: object) -> str:
    """A default as it would be typed; in words where the help has some."""
    for extra in typing.get_args(hint):
        said = getattr(extra, "help_behavior_hint", None)
        if isinstance(said, str):
            return escaped(said.removeprefix("(").removesuffix(")").removeprefix("default: "))
    if isinstance(value, bool):
        return code("yes" if value else "no")
    return code(",".join(map(str, value)) if isinstance(value, tuple) else str(value))


def groups(cls: type, default: Any, hidden: frozenset[str] = frozenset()) -> dict[str, dict[str, list[str]]]:
    """By title of a group its flags, each with its table row; a class's own fields come first."""
    flags, texts = known_flags(cls), docstrings(cls)
    hints = typing.get_type_hints(cls, include_extras=True)
    title = (cls.__doc__ or "").strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    own: dict[str, list[str]] = {}
    inside: dict[str, dict[str, list[str]]] = {}
    for name in (item.name for item in dataclasses.fields(cls) if item.name not in hidden):
        value = getattr(default, name)
        if dataclasses.is_dataclass(value):
            inside |= groups(type(value), value, hidden | hidden_fields(cls))
        elif flag := flags.get(f"--{name.replace('_', '-')}"):
            own[flag.names[0]] = row(flag, value, hints[name], texts.get(name, ""))
    return {title: own, **inside} if own else inside


def row(flag: Flag, value: object, hint: object, text: str) -> list[str]:
    """A flag's cells. Its help is the text below the field, unless the field has one of its own."""
    text = next((extra.help for extra in typing.get_args(hint) if getattr(extra, "help", None)), text)
    takes = [*map(code, flag.choices), escaped(flag.described)]
    return [", ".join(map(code, flag.names)), ", ".join(filter(None, takes)), default_of(value, hint), escaped(text)]


def commands(language: str = "en") -> str:
    """A section for each command; train's has a table for each group of flags."""
    found, words = parsers(), WORDS[language]
    of_train = {flag: cells for group in groups(*found["train"]).values() for flag, cells in group.items()}
    parts = []
    for name, (usage, about, _) in COMMANDS.items():
        parts.append(f"## lockstep {name}\n\n`lockstep {name}{' ' if usage else ''}{usage}`: {escaped(about)}.\n\n")
        for command in (each for each in found if each.split()[0] == name):
            if command != name:
                parts.append(f"### {command.removeprefix(name).strip()}\n\n")
            parts.append(section(command, groups(*found[command]), of_train, language, words))
    return "".join(parts)


def section(
    command: str,
    own: dict[str, dict[str, list[str]]],
    of_train: dict[str, list[str]],
    language: str,
    words: dict[str, str],
) -> str:
    """The tables of one command's flags; those that train has too are named, not told again."""
    flags = {flag: cells for group in own.values() for flag, cells in group.items()}
    if command == "train":
        return "".join(
            f"### {title}\n\n{table(HEADS[language], [said(flag, cells, language) for flag, cells in rows.items()])}\n"
            for title, rows in own.items()
        )
    shared = [flag for flag, cells in flags.items() if of_train.get(flag) == cells]
    rows = [said(flag, cells, language, shown=False) for flag, cells in flags.items() if flag not in shared]
    text = f"{table(HEADS[language], rows)}\n" if rows else ""
    if len(shared) > len(of_train) / 2:
        without = ", ".join(code(flag) for flag in of_train if flag not in flags)
        less = f" ({words['but']} {without})" if without else ""
        return f"{text}{words['all']}{less}.\n\n"
    return f"{text}{words['also']}: {', '.join(map(code, shared))}.\n\n" if shared else text


def said(flag: str, cells: list[str], language: str, shown: bool = True) -> list[str]:
    """A flag's row in a language; `shown`: it is the flag of `lockstep train`, for whose help there are words."""
    return cells if language == "en" else translated(flag if shown else "", cells)


def every_flag() -> set[str]:
    """The names of all flags of all commands."""
    return {name for cls, _ in parsers().values() for name in known_flags(cls)} | set(known_flags(Config))
