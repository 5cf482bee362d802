"""What `lockstep lint` takes: flags, and the table [tool.lockstep.lint] of the nearest pyproject.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.commands.lint.rule import RULES
from lockstep.errors import UserError


@dataclass(frozen=True)
class Lint:
    """How to look, and how to say it."""

    format: str = "text"
    """text, json, sarif (code scanning) or github (annotations of a workflow)."""
    select: str = ""
    """Only these codes, by comma; LS1 stands for all that begin so. [tool.lockstep.lint] select, else all."""
    ignore: str = ""
    """All but these codes, by comma. Beside those of [tool.lockstep.lint] ignore."""
    fix: bool = False
    """Mend what can be mended without a decision, in the files."""
    rules: bool = False
    """List the rules, and end."""
    explain: str = ""
    """Say what these codes are about, by comma, and end; LS1 stands for all that begin so."""


def codes(chosen: Lint, folder: Path) -> frozenset[str]:
    """The codes to look for. Raises UserError for one that is unknown, or a table that is none."""
    table, file = _table(folder)
    select = _listed(chosen.select) or _entries(table, "select", file)
    ignore = _listed(chosen.ignore) + _entries(table, "ignore", file)
    wanted = _matching(select) if select else frozenset(RULES)
    return wanted - _matching(ignore)


def explained(chosen: Lint) -> list[str]:
    """The codes that --explain names, sorted. Raises UserError for one that is unknown."""
    return sorted(_matching(_listed(chosen.explain)))


def _listed(text: str) -> list[str]:
    return [part for part in text.replace(" ", "").split(",") if part]


def _matching(prefixes: list[str]) -> frozenset[str]:
    found: set[str] = set()
    for prefix in prefixes:
        matching = {code for code in RULES if code.startswith(prefix.upper())} or (
            {code for code, rule in RULES.items() if rule.name == prefix}
        )
        if not matching:
            raise UserError(f"no rule has the code {prefix!r}", "`lockstep lint --rules` lists them.")
        found |= matching
    return frozenset(found)


def _table(folder: Path) -> tuple[dict[str, Any], Path]:
    """[tool.lockstep.lint] of the nearest pyproject.toml above a folder, and that file."""
    folder = folder.resolve()
    for each in [folder, *folder.parents]:
        file = each / "pyproject.toml"
        if file.is_file():
            try:
                table = tomllib.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UserError(f"{file} can't be read: {error}", "Mend it, or move it away.") from error
            for name in ("tool", "lockstep", "lint"):
                table = table.get(name, {})
                if not isinstance(table, dict):
                    raise UserError(f"{file}: [tool.lockstep.lint] is no table", 'As: select = ["LS1", "LS2"]')
            if unknown := sorted(set(table) - {"select", "ignore"}):
                raise UserError(f"{file}: [tool.lockstep.lint] has no {unknown[0]}", "It has select and ignore.")
            return table, file
    return {}, folder


def _entries(table: dict[str, Any], name: str, file: Path) -> list[str]:
    found = table.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise UserError(f"{file}: {name} of [tool.lockstep.lint] is no list of codes", f'As: {name} = ["LS101", "LS4"]')
    return found
