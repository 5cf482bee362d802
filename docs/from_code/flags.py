"""Every command and every flag: its names, what it takes, its default, and its help, from the config's classes."""

from typing import Any

from docs.from_code import code, escaped, table
from docs.from_code.chinese import translated
from tests.config.frozen import parsers

from lockstep.commands import COMMANDS
from lockstep.config import Config
from lockstep.config.fields import Flag, flag_names, values_of

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


def groups(default: Any) -> dict[str, dict[str, list[str]]]:
    """By title of a group its flags, each with its table row."""
    found: dict[str, dict[str, list[str]]] = {}
    values = values_of(default)
    for flag in dict.fromkeys(flag_names(default).values()):
        title = (flag.owner.__doc__ or "").strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        found.setdefault(title, {})[flag.name] = row(flag, values[flag.field])
    return found


def row(flag: Flag, value: Any) -> list[str]:
    """A flag's cells: its names, what it takes, its default, and its help."""
    takes = [*map(code, flag.choices), escaped(flag.takes)]
    usual = code({True: "yes", False: "no"}[value] if isinstance(value, bool) else flag.text(value))
    if flag.arg.unset and value in ("", (), 0):
        usual = escaped(flag.arg.unset)
    return [", ".join(map(code, flag.names)), ", ".join(filter(None, takes)), usual, escaped(flag.help)]


def commands(language: str = "en") -> str:
    """A section for each command; train's has a table for each group of flags."""
    found, words = parsers(), WORDS[language]
    of_train = {flag: cells for group in groups(found["train"]).values() for flag, cells in group.items()}
    parts = []
    for name, each in COMMANDS.items():
        usage = f"lockstep {name} {each.arguments}".rstrip()
        parts.append(f"## lockstep {name}\n\n`{usage}`: {escaped(each.summary)}.\n\n")
        for command in (each for each in found if each.split()[0] == name):
            if command != name:
                parts.append(f"### {command.removeprefix(name).strip()}\n\n")
            parts.append(section(command, groups(found[command]), of_train, language, words))
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
    return {name for default in parsers().values() for name in flag_names(default)} | {*flag_names(Config)}
