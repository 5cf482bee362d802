"""What `--help`, `--help SECTION` and `--help all` print, alike for all commands. Imports no torch."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.config import Config
from lockstep.config.fields import Flag, flag_names, values_of
from lockstep.config.flags import habits_of
from lockstep.errors import UserError, unknown

_INDENT, _WIDEST = 24, 100  # columns before the explanations; of the whole
_LONGEST = 60  # of choices beside a flag's name; others stand in its explanation
_SHORT = {"a whole number": "N", "a number": "X", "a name": "NAME"}

# by task: the flags that most runs need; their short help is the first sentence of the long one
EVERYDAY: dict[str, tuple[str, ...]] = {
    "what": ("--dataset", "--data-dir", "--val-fraction", "--model", "--init"),
    "how": (
        *("--epochs", "--batch-size", "--lr", "--optimizer", "--weight-decay", "--schedule", "--augment"),
        *("--precision", "--accumulate", "--patience", "--seed"),
    ),
    "where": ("--nproc", "--gpus", "--workers", "--exact", "--out", "--log", "--verbose"),
}


def width() -> int:
    """Columns to fill."""
    return min(_WIDEST, max(40, shutil.get_terminal_size((80, 24)).columns))


def rows(pairs: Sequence[tuple[str, str]], indent: int = _INDENT) -> Iterator[str]:
    """Lines of names and their explanations; nothing breaks inside a word."""
    for name, says in pairs:
        wrapped = textwrap.wrap(says, width() - indent, break_long_words=False, break_on_hyphens=False)
        if len(name) + 4 > indent or not wrapped:
            yield from textwrap.wrap(
                name, width(), initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
        else:
            yield f"  {name:<{indent - 2}}{wrapped.pop(0)}"
        yield from (" " * indent + line for line in wrapped)


def remark(text: str) -> str:
    """A paragraph as a shell's remark, for what stands above a command."""
    lines = textwrap.wrap(text, width() - 2, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"# {line}" for line in lines)


def command_lines(examples: Sequence[str]) -> Iterator[str]:
    """Commands, one after the other; a long one goes on behind a backslash."""
    for example in examples:
        lines = textwrap.wrap(example, width() - 4, break_long_words=False, break_on_hyphens=False)
        for line in lines[:-1]:
            yield f"  {line} \\"
        yield f"  {lines[-1]}"


def text(usage: str, about: str, default: Any, topic: str, examples: Sequence[str]) -> str:
    """A command's help, or that on one section of its flags.

    Args:
        usage: the line behind `usage: `.
        default: the dataclass whose fields are the flags.
        topic: a section, all, or nothing.
    Raises UserError for an unknown section.
    """
    sections: dict[str, list[Flag]] = {}
    for flag in dict.fromkeys(flag_names(default).values()):
        sections.setdefault("run" if flag.owner is Config else flag.group, []).append(flag)
    names = [name for name in sections if name]
    lines = [
        *textwrap.wrap(f"usage: {usage}", width(), subsequent_indent="    "),
        "",
        *textwrap.wrap(about, width(), break_on_hyphens=False),
    ]
    if topic == "all":
        for name in sections:
            lines += ["", f"{name or 'flags'}:", *rows(list(_explained(default, sections[name])))]
        return "\n".join([*lines, ""])
    if topic:
        if topic not in names:
            known = f"--help all, or one of {', '.join(names)}." if names else "This command's flags have no sections."
            raise unknown("section", topic, names, known) if names else UserError(f"unknown section {topic!r}", known)
        return "\n".join([*lines, "", f"{topic}:", *rows(list(_explained(default, sections[topic]))), ""])
    if isinstance(default, Config):
        for task, flags in EVERYDAY.items():
            lines += ["", f"{task}:", *rows(list(_short(default, flags)), 22)]
    elif own := sections.get(""):
        lines += ["", "flags:", *rows(list(_explained(default, own)))]
    if examples:
        lines += ["", "examples:", *command_lines(examples)]
    if names:
        also = "" if isinstance(default, Config) else " too"
        count = sum(map(len, sections.values()))
        more = f"All {count} flags: --help all. By section, these{also}: --help {', '.join(names)}."
        lines += ["", *textwrap.wrap(more, width(), break_on_hyphens=False)]
    return "\n".join([*lines, ""])


def _short(default: Any, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    known, values = flag_names(default), values_of(default)
    for name in names:
        flag, value = known[name], values[known[name].field]
        letter = next((habit for habit in habits_of(flag) if len(habit) == 2), "")
        says = flag.help.partition(". ")[0].rstrip(".")
        shown = _default(flag, value) if value or isinstance(value, float) else ""
        yield f"{letter}, {name}" if letter else f"    {name}", says + f" [{shown}]" * bool(shown)


def _explained(default: Any, flags: Sequence[Flag]) -> Iterator[tuple[str, str]]:
    values = values_of(default)
    for flag in flags:
        shown = _default(flag, values[flag.field])
        name = f"--[no-]{flag.name[2:]}" if flag.kind is bool else f"{flag.name} {_value(flag)}"
        letters = [f"{habit}, " for habit in habits_of(flag) if len(habit) == 2]
        listed = f" ({', '.join(flag.choices)})" * (len("|".join(flag.choices)) > _LONGEST)
        yield "".join(letters) + name, flag.help + listed + f" [{shown}]" * bool(shown)


def _value(flag: Flag) -> str:
    """What stands for a flag's value."""
    if flag.arg.metavar:
        return flag.arg.metavar
    takes = _SHORT.get(flag.takes, "")
    if flag.choices and len("|".join(flag.choices)) <= _LONGEST:
        return "|".join(filter(None, [*flag.choices, takes]))
    short = {int: "N", float: "X"}.get(flag.kind, "NAME") if flag.kind else "NAME"
    return f"{short},{short},..." if flag.many else short


def _default(flag: Flag, value: Any) -> str:
    """The value of a flag that is not typed, in words where it is empty."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in ("", ()) or (not value and flag.arg.unset):
        return "" if flag.arg.unset == "none" else flag.arg.unset
    return flag.plainly(value)


def front(groups: Mapping[str, Mapping[str, str]], head: str, tail: str, examples: Sequence[str]) -> str:
    """The help of all: commands by group, each with a line."""
    lines = [*textwrap.wrap(head, width(), break_on_hyphens=False)]
    for group, commands in groups.items():
        lines += ["", f"{group}:", *rows(list(commands.items()), 18)]
    lines += ["", "examples:", *command_lines(examples), ""]
    lines += [line for part in tail.split("\n") for line in textwrap.wrap(part, width(), break_on_hyphens=False)]
    return "\n".join(["usage: lockstep COMMAND [ARGUMENTS]", "", *lines, ""])
