"""Every kind of record in a journal with its fields, read from src/lockstep/watch/records.py and its comments."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from docs.from_code import code, escaped, table

SOURCE = Path(__file__).parents[2] / "src/lockstep/watch/records.py"
HEADS = {"en": ["field", "type", "what it is"], "zh": ["字段", "类型", "含义"]}


@dataclass(frozen=True)
class Field:
    """A field of a record."""

    name: str
    type: str
    comment: str


@dataclass(frozen=True)
class Kind:
    """A class of records: its name, docstring, and fields, those of its bases first."""

    name: str
    about: str
    fields: tuple[Field, ...]

    def value(self, field: str) -> str:
        """The one value that a field may have, as `run` of kind: Literal["run"]."""
        types = [each.type for each in self.fields if each.name == field]
        return ", ".join(re.findall(r"'([^']*)'", types[0])) if types else ""

    @property
    def title(self) -> str:
        """What stands in `kind`, and in `fault` of a fault."""
        return ": ".join(filter(None, [self.value("kind"), self.value("fault")]))


def kinds() -> list[Kind]:
    """The records, in the order of the file."""
    text = SOURCE.read_text(encoding="utf-8")
    lines = text.splitlines()
    found: dict[str, Kind] = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        inherited = [field for base in node.bases for field in _fields(found, base)]
        own = [_field(each, lines) for each in node.body if isinstance(each, ast.AnnAssign)]
        found[node.name] = Kind(node.name, ast.get_docstring(node) or "", (*inherited, *own))
    return [kind for kind in found.values() if kind.value("kind")]


def _fields(found: dict[str, Kind], base: ast.expr) -> tuple[Field, ...]:
    kind = found.get(ast.unparse(base))
    return kind.fields if kind else ()


def _field(node: ast.AnnAssign, lines: list[str]) -> Field:
    comment = lines[node.lineno - 1].partition("  # ")[2]
    return Field(ast.unparse(node.target), ast.unparse(node.annotation), comment)


def journal(language: str = "en") -> str:
    """A section for each kind."""
    parts = []
    for kind in kinds():
        rows = [[code(field.name), code(field.type), escaped(field.comment)] for field in kind.fields]
        parts.append(f"## {kind.title}\n\n{escaped(kind.about)}\n\n{table(HEADS[language], rows)}\n")
    return "".join(parts)
