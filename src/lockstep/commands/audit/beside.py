"""Starts beside the usual ones: stopped after an epoch and resumed, and without the local rank as an argument."""

import ast
import dataclasses
import re
import subprocess
from pathlib import Path

from lockstep.commands.audit.launch import local_rank_option, start
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.records import Record, of

_LOADS = re.compile(r"\bload\w*\(|\bfrom_checkpoint\b")
_RESUMES = re.compile(r"^--(resume|restore|continue|ckpt|checkpoint|load|snapshot)([-_](from|path|file|checkpoint))*$")


def beside(
    process: subprocess.Popen[str], script: Path, arguments: list[str], plan: Plan, folder: Path, usual: list[Record]
) -> list[Record]:
    """The records of the other starts that the script gives a reason for, each with its `way`."""
    text = script.read_text(encoding="utf-8", errors="replace")
    found = _resumed(process, script, text, arguments, plan, folder, usual)
    several = next((each.nproc for each in usual if each.nproc > 1 and each.ended == "done"), 0)
    if several and local_rank_option(text):
        bare = dataclasses.replace(plan, nproc=several, bare=True, epochs=1)
        found.append(start(process, script, arguments, bare, folder / "bare", way="bare"))
    return found


def _resumed(
    process: subprocess.Popen[str],
    script: Path,
    text: str,
    arguments: list[str],
    plan: Plan,
    folder: Path,
    usual: list[Record],
) -> list[Record]:
    """A start that ends after its first epoch, and one that finds what it left: on the smallest number of processes."""
    whole = next((each for each in usual if each.ended == "done"), None)
    if whole is None or plan.epochs < 2 or not _LOADS.search(text) or not _saved(whole):
        return []
    short = dataclasses.replace(plan, nproc=whole.nproc, epochs=1)
    stopped = start(process, script, arguments, short, folder / "stopped", way="stopped")
    left = [each for each in _left(stopped) if (folder / "stopped" / "copy" / each).is_file()]
    if stopped.ended != "done" or not _saved(stopped) or not left:
        return []
    more = _option(text, arguments, left[-1])
    again = start(process, script, arguments + more, short, folder / "resumed", folder / "stopped", "resumed")
    loaded = {each["path"] for events in again.ranks.values() for each in of(events, "loaded")}
    return [stopped, again] if loaded & set(left) else []


def _saved(record: Record) -> list[str]:
    """The files that were saved by torch.save, in their order."""
    return [each["path"] for events in record.ranks.values() for each in of(events, "saved") if each["path"]]


def _left(record: Record) -> list[str]:
    """The files that were saved, and those of other names that they may have been moved to."""
    written = [each["path"] for events in record.ranks.values() for each in of(events, "file")]
    return [*written, *_saved(record)]


def _option(text: str, arguments: list[str], path: str) -> list[str]:
    """The arguments by which a script is told to resume from a file; none where it does so by itself."""
    try:
        calls = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)]
    except SyntaxError:
        return []
    for call in (each for each in calls if getattr(each.func, "attr", "") == "add_argument"):
        names = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        name = next((each for each in names if _RESUMES.match(each)), "")
        if name and not any(each.split("=")[0] in names for each in arguments):
            action = next((each.value for each in call.keywords if each.arg == "action"), None)
            flag = isinstance(action, ast.Constant) and action.value == "store_true"
            return [name] if flag else [name, path]
    return []
