"""The command line and the public Python names as text: a line for each flag, field and method.

`python -m tests.config.frozen` writes both files anew; test_frozen.py compares them with what there is.
"""

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import lockstep
from lockstep.commands import COMMANDS
from lockstep.commands.launch_script import TARGETS
from lockstep.commands.shared.arguments import HelpAsked
from lockstep.config import Config
from lockstep.config.fields import flag_names, values_of
from lockstep.config.flags import HABITS, SHORT
from lockstep.config.recipes import RECIPES

HEAD = "# {}\n# A change is a decision: `python -m tests.config.frozen` writes this file anew.\n\n"


def parsers() -> dict[str, Any]:
    """By command the dataclass whose fields are its flags, with its defaults."""
    found: dict[str, Any] = {}
    plain = mock.patch.dict(RECIPES, digits=Config)  # the defaults are the config's, not those of a recipe
    for name, command in COMMANDS.items():
        for target in TARGETS if command.arguments.startswith("|".join(TARGETS)) else [""]:
            if "[FLAGS]" in command.arguments:
                with plain, pytest.raises(HelpAsked) as asked:
                    command.run([*filter(None, [target]), "--help"])
                found[" ".join(filter(None, [name, target]))] = asked.value.default
    return found


def flags(default: Any) -> dict[str, str]:
    """By flag its line: its names, the default, and what it takes."""
    values, lines = values_of(default), {}
    for flag in dict.fromkeys(flag_names(default).values()):
        takes = " | ".join(filter(None, [*flag.choices, flag.takes]))
        lines[flag.name] = f"  {', '.join(flag.names):<54} {flag.text(values[flag.field]) or '-':<16} {takes}".rstrip()
    return lines


def command_line() -> str:
    found = parsers()
    train = flags(found["train"])
    parts = [HEAD.format("The command line: each flag's names, default, and what it takes; -: empty.")]
    for name, own_command in COMMANDS.items():
        parts += [f"lockstep {name} {own_command.arguments}".rstrip(), "\n"]
        for command in (command for command in found if command.split()[0] == name):
            own = flags(found[command])
            shared = [flag for flag, line in own.items() if train.get(flag) == line]
            if command != name:
                parts.append(f" {command.removeprefix(name)}:\n")
            if command == "train" or len(shared) < len(train) / 2:
                parts += [f"{line}\n" for line in own.values()]
                continue
            without = [flag for flag in train if flag not in own]
            parts += [f"{line}\n" for flag, line in own.items() if flag not in shared]
            parts.append(f"  and the other flags of train{', without ' if without else ''}{' '.join(without)}\n")
        parts.append("\n")
    parts.append("Other names that are taken too\n")
    short = {name: f"{flag} {value}" for name, (flag, value) in SHORT.items()}
    parts += [f"  {other:<54} {name}\n" for other, name in {**HABITS, **short}.items()]
    return "".join(parts)


def public_names() -> str:
    """Every name of `lockstep.__all__` with its signature; of a class its fields and methods."""
    parts = [HEAD.format("The public Python names, as their sources declare them.")]
    for name in sorted(lockstep.__all__):
        value = getattr(lockstep, name)
        if inspect.isclass(value):
            bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
            parts.append(f"class {name}{f'({bases})' if bases else ''}\n")
            parts += [f"    {line}\n" for line in _members(value)]
        elif callable(value):
            parts.append(f"def {name}{_signature(_parsed(value))}\n")
        else:
            parts.append(f"{name}: {type(value).__name__}\n")
    return "".join(parts)


def _members(cls: type) -> list[str]:
    """Fields, and methods but for private ones; those of our base classes first."""
    lines = {}
    ours = [each for each in reversed(cls.__mro__) if each.__module__.startswith("lockstep")]
    for node in (node for each in ours for node in _parsed(each).body):
        name = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else getattr(node, "name", "_")
        if (name.startswith("_") and not name.endswith("__")) or name == "__post_init__":
            continue
        if isinstance(node, ast.AnnAssign):
            lines[name] = ast.unparse(node)
        elif isinstance(node, ast.FunctionDef):
            marks = "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list)
            lines[name] = f"{marks}{name}{_signature(node)}"
    return list(lines.values())


def _parsed(value: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def _signature(node: ast.FunctionDef) -> str:
    return f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


FILES = {"command_line.txt": command_line, "public_names.txt": public_names}

if __name__ == "__main__":
    for file, written in FILES.items():
        Path(__file__).with_name(file).write_text(written(), encoding="utf-8")
