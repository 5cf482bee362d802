"""Findings written for people, programs, code scanning and GitHub's annotations."""

import json
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath
from typing import Any

from lockstep.commands.lint.rule import RULES, Finding, Rule

FORMATS = ("text", "json", "sarif", "github")


def written(findings: list[Finding], style: str) -> str:
    """All findings in one of FORMATS."""
    if style == "json":
        return json.dumps([as_plain(each) for each in findings], indent=2)
    if style == "sarif":
        return json.dumps(as_sarif(findings), indent=2)
    if style == "github":
        return "\n".join(map(_annotation, findings))
    return "\n\n".join(map(_paragraph, findings))


def _paragraph(finding: Finding) -> str:
    rule = RULES[finding.code]
    detail = f" ({finding.detail})" if finding.detail else ""
    head = f"{finding.path}:{finding.line}:{finding.column}: {finding.code} {rule.title}{detail}"
    return "\n".join([head, *_told(rule)])


def _told(rule: Rule) -> list[str]:
    """A rule's words in indented lines: result, why, mend."""
    rows = textwrap.wrap(f"result: {rule.result}", 116, initial_indent="    ", subsequent_indent="            ")
    rows += textwrap.wrap(f"why:    {rule.why}", 116, initial_indent="    ", subsequent_indent="            ")
    first, *rest = rule.mend.splitlines()
    return [*rows, f"    mend:   {first}", *(f"            {line}" for line in rest)]


def explanation(code: str) -> str:
    """What a rule is about, in lines: its words, what it looks for, and what silences it."""
    rule = RULES[code]
    looks = " ".join((rule.find.__doc__ or "").split())
    found = textwrap.wrap(f"found:  {looks}", 116, initial_indent="    ", subsequent_indent="            ")
    return "\n".join([f"{code} {rule.name}: {rule.title}", *_told(rule), *found, f"    silent: # noqa: {code}"])


def as_plain(finding: Finding) -> dict[str, Any]:
    """A finding as JSON has it."""
    rule = RULES[finding.code]
    return {
        "file": str(finding.path),
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "code": finding.code,
        "name": rule.name,
        "title": rule.title,
        "detail": finding.detail,
        "result": rule.result,
        "why": rule.why,
        "mend": rule.mend,
        "fixable": bool(finding.edits),
    }


def _annotation(finding: Finding) -> str:
    rule = RULES[finding.code]
    place = (
        f"file={_escaped(str(finding.path), ',:')},line={finding.line},endLine={finding.end_line},col={finding.column}"
    )
    message = _escaped(f"{rule.title}: {rule.result}\n{rule.why}\n{rule.mend}")
    return f"::warning {place},title={finding.code} {_escaped(rule.name, ',:')}::{message}"


def _escaped(text: str, more: str = "") -> str:
    for letter in "%\r\n" + more:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


def as_sarif(findings: list[Finding]) -> dict[str, Any]:
    """SARIF 2.1.0, one run: what code scanning reads."""
    used = sorted({finding.code for finding in findings})
    rules = [
        {
            "id": code,
            "name": RULES[code].name,
            "shortDescription": {"text": RULES[code].title},
            "fullDescription": {"text": f"{RULES[code].result}. {RULES[code].why}."},
            "help": {"text": RULES[code].mend},
        }
        for code in used
    ]
    try:
        number = version("lockstep-torch")
    except PackageNotFoundError:
        number = "0"
    driver = {"name": "lockstep lint", "version": number, "rules": rules}
    results = [_sarif_result(each, used.index(each.code)) for each in findings]
    return {
        "version": "2.1.0",
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "runs": [{"tool": {"driver": driver}, "columnKind": "utf16CodeUnits", "results": results}],
    }


def _sarif_result(finding: Finding, index: int) -> dict[str, Any]:
    rule = RULES[finding.code]
    detail = f" ({finding.detail})" if finding.detail else ""
    region = {"startLine": finding.line, "startColumn": finding.column, "endLine": finding.end_line}
    where = {"artifactLocation": {"uri": PurePosixPath(finding.path).as_posix()}, "region": region}
    message = {"text": f"{rule.title}{detail}: {rule.result}."}
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": "warning",
        "message": message,
        "locations": [{"physicalLocation": where}],
    }
