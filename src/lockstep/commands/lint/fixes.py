"""Edits of findings applied to their files."""

import ast
from itertools import groupby
from pathlib import Path

from lockstep.commands.lint.rule import Edit, Finding
from lockstep.errors import UserError


def fix(findings: list[Finding]) -> list[Finding]:
    """Write the mendings of findings into their files; the findings that are left."""
    left = [each for each in findings if not each.edits]
    for path, group in groupby((each for each in findings if each.edits), key=lambda each: each.path):
        left.extend(_fix(path, list(group)))
    return sorted(left)


def _fix(path: Path, findings: list[Finding]) -> list[Finding]:
    text, left, taken, edits = path.read_bytes(), list[Finding](), list[Edit](), list[Edit]()
    for finding in findings:
        if any(_overlap(one, other) for one in finding.edits for other in taken):
            left.append(finding)  # the next run mends it
        else:
            taken.extend(finding.edits)
            edits.extend(each for each in finding.edits if each not in edits)
    mended = applied(text, edits)
    try:
        ast.parse(mended)
    except SyntaxError as error:
        raise UserError(
            f"{path} would not be Python any more after --fix: {error}", "Mend it by hand; it is unchanged."
        ) from error
    path.write_bytes(mended)
    return left


def _overlap(one: Edit, other: Edit) -> bool:
    if one == other:
        return False
    first, second = (one.line, one.column), (other.line, other.column)
    return first < (other.end_line, other.end_column) and second < (one.end_line, one.end_column)


def applied(text: bytes, edits: list[Edit]) -> bytes:
    """A file's bytes with these edits, the last one first."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mark = 3 if text.startswith(b"\xef\xbb\xbf") else 0
    crossed = text.count(b"\r\n") == text.count(b"\n") > 0  # a file with Windows' line ends keeps them
    for edit in sorted(edits, key=lambda each: (each.line, each.column), reverse=True):
        first = starts[edit.line - 1] + edit.column + (mark if edit.line == 1 else 0)
        last = starts[edit.end_line - 1] + edit.end_column + (mark if edit.end_line == 1 else 0)
        put = edit.text.replace("\n", "\r\n") if crossed else edit.text
        text = text[:first] + put.encode() + text[last:]
    return text
