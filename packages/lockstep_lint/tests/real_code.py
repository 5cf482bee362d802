"""Findings in public repositories, pinned: what lint says of them, and what a reader of the code says of that.

    python tests/real_code.py collect CHECKOUTS OWNER/NAME   # adds a repository's findings, without verdicts
    python tests/real_code.py check CHECKOUTS                # says what lint no longer finds, and what is new
    python tests/real_code.py measure                        # precision and recall, by the verdicts

CHECKOUTS is a folder of work trees named OWNER/NAME, OWNER+NAME or OWNER__NAME, each at the commit that real_code.json
names. That file holds no code of others, only places:

    {"repositories": [{
        "repository": "owner/name", "commit": "40 hex digits",
        "findings": [{"path": "train.py", "line": 7, "code": "LS101", "verdict": "harmful", "listed": 1}],
        "listed": [{"path": "train.py", "line": 9, "code": "", "note": "what is wrong, in our words"}]
    }]}

- findings: what lint reports by default. verdict is "harmful" (the result, the weights, a metric or the run is really
  wrong, breaks, or is much slower on several processes), "harmless" (it is so, and nobody loses by it), "false" (it is
  not so), or null (not read yet). listed: how many harmful faults it covers of those that a reader listed before lint
  ran.
- listed: harmful faults that such a reader listed and that lint does not report; code is that of a rule which should
  have, or empty where there is none.

Precision is harmful findings among those with a verdict. Recall is listed faults that are found among all listed ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from lockstep_lint.check import check
from lockstep_lint.rules import all_rules

PINS = Path(__file__).with_name("real_code.json")
VERDICTS = ("harmful", "harmless", "false", None)

Pin = dict[str, Any]
Place = tuple[str, int, str]  # path, line, code


def read(path: Path = PINS) -> list[Pin]:
    """The pinned repositories."""
    pins: list[Pin] = json.loads(path.read_text(encoding="utf-8"))["repositories"]
    return pins


def checkout(folder: Path, pin: Pin) -> Path | None:
    """The work tree of a repository at its commit, or None where there is none."""
    repository: str = pin["repository"]
    tree = work_tree(folder, repository)
    if tree is not None:
        head, meant = commit(tree), str(pin["commit"])
        if head not in ("", meant):
            raise ValueError(f"{tree} is at {head}; real_code.json means {meant}: git checkout {meant}")
    return tree


def work_tree(folder: Path, repository: str) -> Path | None:
    """The folder of a repository's work tree, or None where there is none."""
    trees = (folder / repository.replace("/", joint) for joint in ("/", "+", "__"))
    return next((tree for tree in trees if tree.is_dir()), None)


def commit(tree: Path) -> str:
    """The commit of a work tree, or an empty text where it has no git folder of its own."""
    if not (tree / ".git").exists():
        return ""
    ran = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def findings(tree: Path) -> list[Place]:
    """What lint reports in a work tree by default."""
    here = Path.cwd()
    os.chdir(tree)
    try:
        report = check([Path()], [*all_rules().values()])
    finally:
        os.chdir(here)
    return [(each.path, each.line, each.code) for each in report.findings]


def pinned(pin: Pin) -> list[Place]:
    """What real_code.json says that lint reports."""
    return [(each["path"], each["line"], each["code"]) for each in pin["findings"]]


def differences(folder: Path, pins: list[Pin]) -> list[str]:
    """One line for each finding that is lost or new, and for each repository that is not there."""
    lines = []
    for pin in pins:
        tree = checkout(folder, pin)
        if tree is None:
            lines.append(f"{pin['repository']}: no checkout")
            continue
        now, before = set(findings(tree)), set(pinned(pin))
        for sign, places in (("lost", before - now), ("new", now - before)):
            lines += [f"{pin['repository']}: {sign} {path}:{line} {code}" for path, line, code in sorted(places)]
    return lines


def collect(folder: Path, repository: str, pins: list[Pin]) -> None:
    """Enters a repository's findings; verdicts that are known of the same places stay."""
    pin = next((each for each in pins if each["repository"] == repository), None)
    if pin is None:
        pin = {"repository": repository, "commit": "", "findings": [], "listed": []}
        pins.append(pin)
    tree = work_tree(folder, repository)
    if tree is None:
        raise FileNotFoundError(f"{folder} has no work tree of {repository}")
    pin["commit"] = commit(tree) or pin["commit"]
    known = dict(zip(pinned(pin), pin["findings"], strict=True))
    new = {"verdict": None, "listed": 0}
    pin["findings"] = [
        known.get(place, {"path": place[0], "line": place[1], "code": place[2], **new}) for place in findings(tree)
    ]


def measure(pins: list[Pin]) -> str:
    """Precision and recall as text, with the verdicts of each rule."""
    verdicts: Counter[tuple[str, str | None]] = Counter()
    found = missed = 0
    for pin in pins:
        verdicts.update((each["code"], each["verdict"]) for each in pin["findings"])
        found += sum(each["listed"] for each in pin["findings"])
        missed += len(pin["listed"])
    total = {verdict: sum(n for (_, v), n in verdicts.items() if v == verdict) for verdict in VERDICTS}
    judged = sum(total.values()) - total[None]
    lines = [f"{'code':6} {'harmful':>8} {'harmless':>8} {'false':>8}"]
    for code in sorted({code for code, _ in verdicts}):
        lines.append(f"{code:6} " + " ".join(f"{verdicts[code, verdict]:8}" for verdict in VERDICTS[:3]))
    lines.append(f"{len(pins)} repositories, {judged} findings judged, {total[None]} not yet")
    if judged:
        lines.append(", ".join(f"{verdict} {100 * total[verdict] / judged:.0f} %" for verdict in VERDICTS[:3]))
    if found + missed:
        lines.append(f"recall {100 * found / (found + missed):.0f} %: {found} of {found + missed} listed faults")
    return "\n".join(lines)


def as_text(pins: list[Pin]) -> str:
    """JSON with a line for each repository and each place."""
    parts = []
    for pin in pins:
        lists = [",".join(f"\n  {json.dumps(each)}" for each in pin[name]) for name in ("findings", "listed")]
        named = f'{{"repository": {json.dumps(pin["repository"])}, "commit": {json.dumps(pin["commit"])}'
        parts.append(f' {named}, "findings": [{lists[0]}], "listed": [{lists[1]}]}}')
    return '{"repositories": [\n' + ",\n".join(parts) + "\n]}\n"


def main(arguments: list[str]) -> int:
    """Runs one of the three verbs."""
    pins = read()
    match arguments:
        case ["collect", folder, repository]:
            collect(Path(folder), repository, pins)
            PINS.write_text(as_text(pins), encoding="utf-8")
        case ["check", folder]:
            lines = differences(Path(folder), pins)
            print("\n".join(lines) or "as pinned")
            return 1 if lines else 0
        case ["measure"]:
            print(measure(pins))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
