"""How findings are written: for people, for other programs, for GitHub, and as SARIF."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import PurePath
from urllib.parse import quote

from lockstep_lint import __version__
from lockstep_lint.check import Finding
from lockstep_lint.rules import Rule

Rules = dict[str, Rule]


def printable(text: str) -> str:
    """A text in which control characters and broken bytes are escaped, so that a terminal takes none of them."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )


def title(finding: Finding, rules: Rules) -> str:
    """The rule's title with the finding's own detail."""
    detail = f" ({printable(finding.detail)})" if finding.detail else ""
    return rules[finding.code].title + detail


def as_text(findings: list[Finding], rules: Rules) -> str:
    """One paragraph for each finding: the place, what is wrong, what becomes of the run."""
    parts = []
    for each in findings:
        place = f"{printable(each.path)}:{each.line}:{each.column}"
        result = textwrap.fill(rules[each.code].result, 110, initial_indent="    ", subsequent_indent="    ")
        parts.append(f"{place}: {each.code} {title(each, rules)}\n{result}\n")
    files = len({each.path for each in findings})
    if findings:
        parts.append(f"{count(len(findings), 'finding')} in {count(files, 'file')}; --explain CODE says more\n")
    return "\n".join(parts)


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_json(findings: list[Finding], rules: Rules) -> str:
    """A list of objects."""
    entries = []
    for each in findings:
        rule = rules[each.code]
        place: dict[str, object] = {"file": each.path, "line": each.line, "column": each.column}
        said = {"code": each.code, "name": rule.name, "title": rule.title, "detail": each.detail, "result": rule.result}
        entries.append(place | {"end_line": each.end_line} | said)
    return json.dumps(entries, indent=2) + "\n"


def as_github(findings: list[Finding], rules: Rules) -> str:
    """Workflow commands, which GitHub shows beside the lines."""
    lines = []
    for each in findings:
        message = f"{title(each, rules)}: {rules[each.code].result}"
        place = f"file={_escaped(each.path, ':,')},line={each.line},endLine={each.end_line},col={each.column}"
        lines.append(f"::warning {place},title={each.code}::{_escaped(message)}\n")
    return "".join(lines)


def _escaped(text: str, also: str = "") -> str:
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return printable(text)


def as_sarif(findings: list[Finding], rules: Rules) -> str:
    """A log of SARIF 2.1.0, which code hosts and editors read."""
    used = sorted({each.code for each in findings})
    driver = {
        "name": "lockstep-lint",
        "version": __version__,
        "rules": [
            {
                "id": code,
                "name": rules[code].name,
                "shortDescription": {"text": rules[code].title},
                "fullDescription": {"text": rules[code].result},
            }
            for code in used
        ],
    }
    results = [
        {
            "ruleId": each.code,
            "ruleIndex": used.index(each.code),
            "level": "warning",
            "message": {"text": f"{title(each, rules)}: {rules[each.code].result}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(PurePath(each.path).as_posix(), errors="surrogateescape")},
                        "region": {"startLine": each.line, "startColumn": each.column, "endLine": each.end_line},
                    }
                }
            ],
        }
        for each in findings
    ]
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }
    return json.dumps(log, indent=2) + "\n"


FORMATS: dict[str, Callable[[list[Finding], Rules], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
}


def page(rule: Rule) -> str:
    """What --explain prints."""
    paragraphs = [f"{rule.code} {rule.name}: {rule.title}", *rule.paragraphs[1:]]
    filled = "\n\n".join(textwrap.fill(each, 110) for each in paragraphs)
    examples = [
        f"{name}:\n\n{textwrap.indent(code, '    ')}" for name, code in (("Wrong", rule.wrong), ("Right", rule.right))
    ]
    return "\n\n".join([filled, *examples]) + "\n"


def table(rules: Rules) -> str:
    """What --rules prints."""
    width = max(len(rule.name) for rule in rules.values())
    lines = [f"{rule.code}  {rule.name:{width}}  {rule.title}" for rule in rules.values()]
    return "\n".join(lines) + "\n"
