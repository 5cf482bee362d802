"""The command `lockstep-lint`."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import tomllib
from pathlib import Path

from lockstep_lint import __version__
from lockstep_lint.check import check
from lockstep_lint.output import FORMATS, page, printable, table
from lockstep_lint.rules import Rule, all_rules

CLEAN, FOUND, FAILED = 0, 1, 2


class UsageError(Exception):
    """What was asked for can't be done; the message says why and what to do."""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="lockstep-lint",
        description="Finds what goes wrong when several processes run a PyTorch training script, without running it.",
        epilog="Exit codes: 0 nothing found, 1 something found, 2 a path, a flag or a setting that can't be used.",
    )
    made.add_argument("paths", nargs="*", type=Path, help="files and folders (default: this folder)")
    made.add_argument(
        "--select", metavar="CODES", help="only these rules: codes or their beginnings, with commas; ALL for all"
    )
    made.add_argument("--ignore", metavar="CODES", help="not these rules")
    made.add_argument("--format", choices=FORMATS, default="text", help="how findings are written (default: text)")
    made.add_argument("--rules", action="store_true", help="list the rules")
    made.add_argument("--explain", metavar="CODE", help="say what a rule is about, with a wrong and a right example")
    made.add_argument("--version", action="version", version=f"lockstep-lint {__version__}")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with its arguments, those of the process by default, and returns its exit code."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as ended:  # argparse has printed its message
        return ended.code if isinstance(ended.code, int) else FAILED
    try:
        return run(options)
    except UsageError as error:
        print(f"lockstep-lint: {printable(str(error))}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND


def run(options: argparse.Namespace) -> int:
    """Does what the flags say."""
    rules = all_rules()
    if options.rules:
        print(table(rules), end="")
        return CLEAN
    if options.explain:
        code = options.explain.upper()
        if code not in rules:
            raise UsageError(f"there is no rule {code}; --rules lists them")
        print(page(rules[code]), end="")
        return CLEAN
    settings = read_settings(Path.cwd())
    select = options.select.split(",") if options.select is not None else settings.get("select")
    ignore = options.ignore.split(",") if options.ignore is not None else settings.get("ignore", [])
    chosen = choose(rules, select, ignore)
    paths = options.paths or [Path()]
    for path in paths:
        if not os.path.lexists(path):
            raise UsageError(f"{path} does not exist")
    report = check(paths, chosen)
    if not report.files:
        print(f"lockstep-lint: no Python file in {printable(', '.join(map(str, paths)))}", file=sys.stderr)
    sys.stdout.write(FORMATS[options.format](report.findings, rules))
    sys.stdout.flush()
    for name, why in report.unread.items():
        print(f"lockstep-lint: {printable(name)} was not read: {printable(why)}", file=sys.stderr)
    if any(str(path) in report.unread for path in paths):
        return FAILED
    return FOUND if report.findings else CLEAN


def choose(rules: dict[str, Rule], select: list[str] | None, ignore: list[str]) -> list[Rule]:
    """The rules that run: all of them or those that are selected, without the ignored ones."""
    chosen = [*rules.values()]
    if select is not None:
        wanted = [_prefix(each, rules) for each in select if each.strip()]
        chosen = [rule for rule in rules.values() if rule.code.startswith(tuple(wanted))]
    unwanted = tuple(_prefix(each, rules) for each in ignore if each.strip())
    return [rule for rule in chosen if not (unwanted and rule.code.startswith(unwanted))]


def _prefix(text: str, rules: dict[str, Rule]) -> str:
    prefix = "LS" if text.strip().upper() == "ALL" else text.strip().upper()
    if not re.fullmatch("LS[0-9]*", prefix) or not any(code.startswith(prefix) for code in rules):
        raise UsageError(f"no rule begins with {text.strip()!r}; --rules lists them")
    return prefix


def read_settings(folder: Path) -> dict[str, list[str]]:
    """The table [tool.lockstep.lint] of the nearest pyproject.toml."""
    for each in (folder, *folder.parents):
        path = each / "pyproject.toml"
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} can't be read: {error}") from None
        try:
            table = tomllib.loads(text).get("tool", {}).get("lockstep", {}).get("lint", {})
        except (tomllib.TOMLDecodeError, AttributeError) as error:
            raise UsageError(f"{path} is not right: {error}") from None
        for name, value in table.items():
            if (
                name not in ("select", "ignore")
                or not isinstance(value, list)
                or not all(isinstance(v, str) for v in value)
            ):
                raise UsageError(
                    f"{path}: tool.lockstep.lint knows select and ignore, lists of codes; not {name} = {value!r}"
                )
        return dict(table)
    return {}


def entry() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):  # a file name may have bytes that the terminal can't show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())
