"""What `lockstep lint` takes, and its exit code. Imports no torch."""

from pathlib import Path

from lockstep.commands.lint.check import check, files
from lockstep.commands.lint.fixes import fix
from lockstep.commands.lint.output import FORMATS, explanation, written
from lockstep.commands.lint.rule import RULES
from lockstep.commands.lint.settings import Lint, codes, explained
from lockstep.commands.shared.arguments import parse, print_error
from lockstep.config.flags import split_arguments
from lockstep.errors import EXIT_FAILURE, UserError, unknown


def main(args: list[str]) -> int:
    """Look for faults in training scripts; 0: none, 1: some, 2: a file or flag that is not as it should be."""
    names, rest = split_arguments(args, Lint)
    about = (
        "Find in PyTorch training scripts what changes the result when several processes run them, without running "
        "them. Exit codes: 0 nothing found, 1 something found, 2 a file or a flag can't be read."
    )
    chosen: Lint = parse(Lint, Lint(), rest, "lockstep lint FILE|FOLDER...", about)
    if chosen.format not in FORMATS:
        raise unknown("format", chosen.format, FORMATS)
    if chosen.rules:
        print("\n".join(f"{code}  {rule.name:<30}{rule.title}" for code, rule in sorted(RULES.items())))
        return 0
    if chosen.explain:
        print("\n\n".join(map(explanation, explained(chosen))))
        return 0
    paths = [Path(name) for name in names]
    if not paths:
        raise UserError("lint takes files or folders, got none", "As `lockstep lint train.py`, or `lockstep lint .`.")
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} is not there", "Name a Python file, or a folder of them.")
    wanted = codes(chosen, paths[0] if paths[0].is_dir() else paths[0].parent)
    listed = files(paths)
    found, broken = check(listed, wanted)
    for path in broken:
        print_error(f"{path} is no Python that can be read; left out")
    if chosen.fix:
        before = len(found)
        found = fix(found)
        print_error(f"{before - len(found)} of {before} findings mended")
    if found or chosen.format in ("json", "sarif"):
        print(written(found, chosen.format))
    if chosen.format == "text":
        counted = f"{len(found)} finding{'s' if len(found) != 1 else ''}"
        print(f"{chr(10) if found else ''}{counted} in {len(listed)} file{'s' if len(listed) != 1 else ''}")
    unread = any(path in broken for path in paths)
    return 2 if unread else EXIT_FAILURE if found else 0
