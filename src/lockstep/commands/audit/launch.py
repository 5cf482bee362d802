"""Start the user's script as N processes in a working copy, and gather what they leave; usual starts and others."""

import ast
import dataclasses
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.commands.audit import records, scratch
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.records import Record, of
from lockstep.errors import UserError

_SPAWNS = re.compile(r"\bspawn\(|\bstart_processes\(|\bProcess\(|notebook_launcher\(")
_WORLD = re.compile(r"""['"]--(world[-_]size|nprocs?|nproc[-_]per[-_]node|num[-_]gpus|ngpus|gpus?|n[-_]?gpus?)['"]""")
_LOCAL_RANK = re.compile(r"""['"](--local[-_]rank)['"]""")
_SLACK_S = 60.0  # that the starter may take beyond the script's deadline: importing torch, forking, ending
_PRINTED = 20_000  # characters of what a process printed that are kept, from the end


@contextmanager
def starter(script: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that starts all others; gone at the end, and they with it."""
    text = script.read_text(encoding="utf-8", errors="replace")
    more = [name for name in ("torchvision",) if re.search(rf"\b{name}\b", text)]
    command = [sys.executable, "-m", "lockstep.commands.audit.starter", str(os.getpid()), *more]
    source = str(Path(__file__).parents[3])  # that this package is imported from
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()  # it ends by itself then
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start(
    process: subprocess.Popen[str],
    script: Path,
    arguments: list[str],
    plan: Plan,
    place: Path,
    earlier: Path | None = None,
    purpose: str = "",
) -> records.Record:
    """Run the script as `plan.nproc` processes; `place` is an empty folder for all that this takes.

    `earlier`: the `place` of a start whose working copy, with all that it left there, is run in once more.
    """
    home, events, out = (earlier or place) / "copy", place / "events", place / "out"
    for folder in (events, out):
        folder.mkdir(parents=True)
    left = [] if earlier else scratch.copy(Path(plan.origin or script.parent), home)
    text = script.read_text(encoding="utf-8", errors="replace")
    plan = _planned(plan, script, text, arguments, home, events)
    if plan.spawns and plan.nodes > 1:
        plan = dataclasses.replace(plan, nodes=1)
        left.append("one machine: the script starts its processes by itself")
    plan.write(place / "plan.json")
    ranks = [{}] if plan.spawns else [_environment(rank, plan.nproc, plan.nodes) for rank in range(plan.nproc)]
    begin = time.monotonic()
    answer = _asked(process, {"plan": str(place / "plan.json"), "ranks": ranks, "out": str(out)}, plan.deadline_s)
    texts = [out / f"{number}.txt" for number in range(len(ranks))]
    printed = [each.read_text("utf-8", "replace")[-_PRINTED:] if each.exists() else "" for each in texts]
    return records.load(
        events,
        plan.nproc,
        home=str(home),
        left=tuple(left),
        codes=tuple(answer["codes"]),
        ended=answer["ended"],
        printed=tuple(printed),
        seconds=time.monotonic() - begin,
        purpose=purpose,
    )


def local_rank_option(text: str) -> str:
    """The option by which a script wants its local rank, where it doesn't ask the environment for it; "" for none."""
    found = _LOCAL_RANK.search(text)
    return found[1] if found and not _SPAWNS.search(text) and "LOCAL_RANK" not in text else ""


def _planned(plan: Plan, script: Path, text: str, arguments: list[str], home: Path, events: Path) -> Plan:
    words = [each.replace("{nproc}", str(plan.nproc)) for each in arguments]
    origin = Path(plan.origin or script.parent)
    spawns, world = bool(_SPAWNS.search(text)), _WORLD.search(text)
    if spawns and world and not any(each.split("=")[0] == f"--{world[1]}" for each in words):
        words += [f"--{world[1]}", str(plan.nproc)]
    return dataclasses.replace(
        plan,
        script=str(home / script.relative_to(origin)),
        arguments=tuple(words),
        home=str(home),
        origin=str(origin),
        events=str(events),
        spawns=spawns,
        local_rank="" if plan.bare else local_rank_option(text),
    )


def _environment(rank: int, world: int, nodes: int) -> dict[str, str]:
    """What torchrun gives to a process; the first `world / nodes` ranks are the first machine's."""
    each = world // nodes
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank % each,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": each,
        "GROUP_RANK": rank // each,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "audit",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in values.items()}


def _asked(process: subprocess.Popen[str], request: dict[str, object], deadline_s: float) -> dict[str, list[int]]:
    """The starter's answer, awaited for no longer than the deadline and some slack."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    ready, _, _ = select.select([process.stdout], [], [], deadline_s + _SLACK_S)
    line = process.stdout.readline() if ready else ""
    if not line:
        raise UserError("the processes could not be started or ended", "Is there memory for them, and a loopback?")
    answer: dict[str, list[int]] = json.loads(line)
    return answer


_LOADS = re.compile(r"\bload\w*\(|\bfrom_checkpoint\b")
_RESUMES = re.compile(r"^--(resume|restore|continue|ckpt|checkpoint|load|snapshot)([-_](from|path|file|checkpoint))*$")


def other_starts(
    process: subprocess.Popen[str], script: Path, arguments: list[str], plan: Plan, folder: Path, usual: list[Record]
) -> list[Record]:
    """The records of the other starts that the script gives a reason for, each with its `purpose`."""
    text = script.read_text(encoding="utf-8", errors="replace")
    found = _resumed(process, script, text, arguments, plan, folder, usual)
    several = next((each.nproc for each in usual if each.nproc > 1 and each.ended == "done"), 0)
    if several and local_rank_option(text):
        bare = dataclasses.replace(plan, nproc=several, bare=True, epochs=1)
        found.append(start(process, script, arguments, bare, folder / "bare", purpose="bare"))
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
    stopped = start(process, script, arguments, short, folder / "stopped", purpose="stopped")
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
    """The arguments that have a script resume from a file; none where it does so by itself."""
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
