"""The command line and the public Python names as text: a line for each flag, field and method.

`python -m tests.config.frozen` writes both files anew; test_frozen.py compares them with what there is.
"""

import ast
import contextlib
import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import lockstep
from lockstep.cli import COMMANDS
from lockstep.commands.launch_script.command import TARGETS
from lockstep.config import Config
from lockstep.config.flags import known_flags
from lockstep.config.recipes import RECIPES
from lockstep.errors import RENAMED

HEAD = "# {}\n# A change is a decision: `python -m tests.config.frozen` writes this file anew.\n\n"


def parsers() -> dict[str, tuple[type, Any]]:
    """By command what it hands to its parser: the class whose fields are its flags, and their defaults."""
    found: dict[str, tuple[type, Any]] = {}

    def parse(cls: type, *, default: Any, **_: Any) -> None:
        found[command] = (cls, default)
        raise SystemExit

    plain = mock.patch.dict(RECIPES, digits=Config)  # the defaults are the config's, not those of a recipe
    for name, (usage, _, run) in COMMANDS.items():
        for target in TARGETS if usage.startswith("|".join(TARGETS)) else [""]:
            command = " ".join(filter(None, [name, target]))
            if "[FLAGS]" in usage:
                with plain, mock.patch("tyro.cli", parse), contextlib.suppress(SystemExit):
                    run([*filter(None, [target]), "--help=all"])
    return found


def flags(cls: type, default: Any) -> dict[str, str]:
    """By flag its line: all its names, the default, and what it takes."""
    values = _values(default)
    lines = {}
    for flag in dict.fromkeys(known_flags(cls).values()):
        value = values[flag.names[0].removeprefix("--").replace("-", "_")]
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        takes = " | ".join(filter(None, [*flag.choices, flag.described]))
        lines[flag.names[0]] = f"  {', '.join(flag.names):<54} {text or '-':<16} {takes}".rstrip()
    return lines


def _values(group: Any) -> dict[str, Any]:
    """The fields of a config and of those in it; its own come first."""
    own, inside = {}, dict[str, Any]()
    for name, value in vars(group).items():
        if dataclasses.is_dataclass(value):
            inside |= _values(value)
        else:
            own[name] = value
    return inside | own


def command_line() -> str:
    """Every command with every flag."""
    found = parsers()
    train = flags(*found["train"])
    parts = [HEAD.format("The command line: each flag's names, default, and what it takes; -: empty.")]
    for name, (usage, _, _) in COMMANDS.items():
        parts += [f"lockstep {name} {usage}".rstrip(), "\n"]
        for command in (command for command in found if command.split()[0] == name):
            own = flags(*found[command])
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
    parts.append("Called otherwise here, and said so to whoever types it\n")
    parts += [f"  {old:<54} {new}\n" for old, new in RENAMED.items()]
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
