"""Every public Python name with its signature, methods and docstrings, as the source has them."""

import ast
import inspect
import re
import textwrap
from typing import Any

from docs.from_code import escaped

import lockstep
from lockstep import _PUBLIC

SECTIONS = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")


def prose(docstring: str) -> str:
    """A docstring as Markdown: its paragraphs, and lists for what it takes and raises."""
    lines: list[str] = []
    listing = False
    for line in inspect.cleandoc(docstring).splitlines():
        if SECTIONS.match(line):
            listing = True
            lines += ["", f"**{line}**", ""]
        elif listing and re.match(r"    \w[\w, *]*: ", line):
            name, _, text = line.strip().partition(": ")
            lines.append(f"- `{name}`: {escaped(text)}")
        elif line.startswith("    ") and not listing:
            lines.append(line)
        else:
            listing = listing and line.startswith(" ")
            lines.append(f"  {escaped(line)}" if listing else escaped(line))
    return "\n".join(lines).strip()


def declaration(node: Any) -> str:
    """A function's first lines, or a class's name and bases."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}{f'({bases})' if bases else ''}"
    marks = "".join(f"@{ast.unparse(mark)}\n" for mark in node.decorator_list)
    given = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({ast.unparse(node.args)}){given}"
    if len(line) > 90:
        arguments = re.split(r", (?![^\[\(]*[\]\)])", ast.unparse(node.args))
        line = f"def {node.name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){given}"
    return marks + line


def members(node: ast.ClassDef) -> str:
    """The fields and public methods of a class."""
    fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
    shown = [field for field in fields if not field.startswith("_")]
    parts = [f"```python\n{chr(10).join(shown)}\n```\n\n"] if shown else []
    for each in node.body:
        public = isinstance(each, ast.FunctionDef) and (not each.name.startswith("_") or each.name == "__call__")
        if isinstance(each, ast.FunctionDef) and public:
            parts.append(f"```python\n{declaration(each)}\n```\n\n{prose(ast.get_docstring(each) or '')}\n\n")
    return "".join(parts)


def api(_language: str = "en") -> str:
    """A section for each name, in the order of the alphabet."""
    parts = []
    for name in sorted(_PUBLIC, key=str.lower):
        value = getattr(lockstep, name)
        node: Any = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
        parts.append(f"## {name}\n\n```python\n{declaration(node)}\n```\n\n{prose(value.__doc__ or '')}\n\n")
        if isinstance(node, ast.ClassDef):
            parts.append(members(node))
    return "".join(parts)
