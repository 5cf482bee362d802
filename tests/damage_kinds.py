"""The ways to damage a run folder, or one checkpoint: each returns whether it signed anew what it forged."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.format import MANIFEST, FileRecord, Manifest
from lockstep.monitoring import journal
from tests.pickles import pickled

_LOCK = "run.lock"  # a run leaves one where it was killed

_STRANGERS = (
    "step-000000099", ".writing-00000000-step-000000099", ".replaced-0a0a0a0a-step-000000002", "x.pt", "data.pkl",
    ".removing-0a0a0a0a-step-000000001", "damaged-step-000000004", "sitecustomize.py", "torch.py", "a\n", _LOCK,
)  # fmt: skip


@dataclass
class Case:
    """A copy of a run's folder, of which something is to be damaged."""

    folder: Path
    rng: random.Random
    sentinel: Path  # where it exists, code ran
    elsewhere: Path  # a folder for what links lead to
    damaged: str = "nothing"  # the path of that, below the folder

    def part(self) -> str:
        """The folder below the run's in which the damage is; empty for the run's own."""
        head, slash, _ = self.damaged.partition("/")
        return head if slash else ""

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def pick(self, *patterns: str) -> Path:
        """A file to damage."""
        found = [path for path in self.files() if not patterns or any(path.match(p) for p in patterns)]
        return self.noted(self.rng.choice(found))

    def noted(self, path: Path) -> Path:
        self.damaged = str(path.relative_to(self.folder))
        return path


def bits(case: Case) -> bool:
    path = case.pick()
    content = bytearray(path.read_bytes())
    for _ in range(case.rng.choice([1, 1, 1, 2, 8])):
        content[case.rng.randrange(len(content))] ^= 1 << case.rng.randrange(8)
    path.write_bytes(content)
    return False


def overwritten(case: Case) -> bool:
    path = case.pick()
    content = bytearray(path.read_bytes())
    start = case.rng.randrange(len(content))
    length = case.rng.randrange(1, min(len(content) - start, 4096) + 1)
    content[start : start + length] = case.rng.choice([bytes(length), case.rng.randbytes(length), b"\xff" * length])
    path.write_bytes(content)
    return False


def cut(case: Case) -> bool:
    path = case.pick()
    content = path.read_bytes()
    path.write_bytes(content[: case.rng.choice([0, 1, case.rng.randrange(len(content)), len(content) - 1])])
    return False


def appended(case: Case) -> bool:
    with case.pick().open("ab") as file:
        file.write(case.rng.choice([b"\0", b" ", b"\n", b"}", b"{}\n", b"null\n", case.rng.randbytes(90), bytes(5000)]))
    return False


def swapped(case: Case) -> bool:
    one = case.pick()
    alike = [path for path in case.files() if path.name == one.name and path != one]
    other = case.rng.choice(alike if alike and case.rng.random() < 0.6 else case.files())
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    # best and final are both the run's: which file has which name is all there is to tell them by
    return {one.parent.name, other.parent.name} == {"weights"}


def removed(case: Case) -> bool:
    path = case.pick()
    path.unlink()
    if case.rng.random() < 0.3:
        shutil.rmtree(path.parent if path.parent != case.folder else case.folder / "checkpoints", ignore_errors=True)
    return False


def special(case: Case) -> bool:
    path = case.noted(case.rng.choice([*case.files(), case.folder / _LOCK, case.folder / "checkpoints"]))
    target = case.elsewhere / "moved"
    if case.rng.random() < 0.5 and path.exists():
        path.rename(target)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match case.rng.randrange(4):
        case 0:
            path.symlink_to(
                case.rng.choice([str(target), "/etc/passwd", "/dev/zero", "/dev/full", path.name, "no", "."])
            )
        case 1:
            os.mkfifo(path)
        case 2:
            path.mkdir()
        case 3:
            path.touch(mode=0o600)
    return False


def added(case: Case) -> bool:
    """Things that nobody put there, beside the run's own and in its checkpoints."""
    folder = case.rng.choice([case.folder, *{path.parent for path in case.files()}, case.folder / "checkpoints"])
    folder.mkdir(exist_ok=True)
    path = case.noted(folder / case.rng.choice(_STRANGERS))
    match case.rng.randrange(3):
        case 0:
            path.mkdir()
        case 1:
            path.write_bytes(pickled(case.rng, case.sentinel))
        case 2:
            path.write_bytes(f"import os; os.mkdir({str(case.sentinel)!r})\n".encode())
    return False


def pickles(case: Case) -> bool:
    path = case.pick()
    path.write_bytes(pickled(case.rng, case.sentinel))
    return _signed(case, path)


_VALUES: list[Callable[[random.Random], Any]] = [
    lambda _: None,
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice([0, -1, 1, 2, 7, 10**6]),
    lambda rng: rng.choice([2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400]),
    lambda rng: rng.choice([0.5, -0.5, 1e308, float("nan"), float("inf"), -float("inf")]),
    lambda rng: rng.choice(["", "0", "nan", "a\0\n", "x" * 100_000, "../../../../etc/passwd", "os:system"]),
    lambda rng: rng.choice([[], {}, [[[[]]]], [1, "a", None]]),
    lambda rng: rng.choice([{"$tensor": "state.0.exp_avg"}, {"$pickle": "gASV"}]),
    lambda rng: rng.choice([{"$tuple": [[], {}]}, {"$dict": [[1, 2], [1, 3]]}]),
    lambda rng: _nested(rng.choice([50, 700, 5000])),
]


def _nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def _spots(document: Any) -> list[tuple[Any, Any]]:
    """Every container and key of a document of JSON."""
    found: list[tuple[Any, Any]] = []
    ahead = [document]
    while ahead:
        value = ahead.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            found.append((value, key))
            ahead.append(item)
    return found


def _forged(case: Case, document: Any) -> Any:
    """One to three entries of a document changed, removed, added or renamed."""
    for _ in range(case.rng.choice([1, 1, 2, 3])):
        spots = _spots(document)
        if not spots:
            break
        place, key = case.rng.choice(spots)
        match case.rng.randrange(6):
            case 0:
                del place[key]
            case 1 if isinstance(place, dict):
                place[case.rng.choice(["x", "", "$tuple", "__class__", "kind", "step"])] = case.rng.choice(_VALUES)(
                    case.rng
                )
            case 2 if isinstance(place[key], int | float) and not isinstance(place[key], bool):
                place[key] = case.rng.choice([-place[key], place[key] + 1, place[key] * 10**9, str(place[key])])
            case _:
                place[key] = case.rng.choice(_VALUES)(case.rng)
    return document


def _text(document: Any) -> bytes:
    try:
        return json.dumps(document).encode()
    except (RecursionError, ValueError):  # deeper than this writer goes, or a number of more digits than it prints
        return b'{"a":' * 50_000 + b"1" + b"}" * 50_000


def fields(case: Case) -> bool:
    """Fields of any JSON forged; those of a checkpoint often with a manifest and a journal that vouch for them."""
    path = case.pick("*.json", "*.json", "journal.jsonl")
    if path.suffix == ".jsonl":
        lines = path.read_bytes().splitlines()
        for number in case.rng.sample(range(len(lines)), case.rng.choice([1, 2, 5])):
            record = _forged(case, json.loads(lines[number]))
            whole = isinstance(record, dict) and type(record.get("step")) is int
            if case.rng.random() < 0.5 and whole and isinstance(record.get("digest"), str):
                record["checksum"] = journal.checksum(record["step"], record["digest"])
            lines[number] = _text(record)
            if not isinstance(record, dict):
                break
        path.write_bytes(b"\n".join(lines) + b"\n")
        return False
    path.write_bytes(_text(_forged(case, json.loads(path.read_bytes()))))
    return _signed(case, path) or path.name == "config.json"


def lines(case: Case) -> bool:
    """The journal's lines doubled, left out, in another order, torn, joined or between zeros."""
    path = case.noted(case.folder / "journal.jsonl")
    found = path.read_bytes().splitlines(keepends=True)
    for _ in range(case.rng.choice([1, 3, 9])):
        number = case.rng.randrange(len(found))
        match case.rng.randrange(6):
            case 0:
                found.insert(number, case.rng.choice(found))
            case 1 if len(found) > 1:
                del found[number]
            case 2:
                case.rng.shuffle(found)
            case 3:
                found[number] = found[number][: case.rng.randrange(len(found[number]) + 1)]
            case 4:
                found[number] = bytes(case.rng.choice([1, 512, 4096])) + found[number]
            case 5:
                found[number] = case.rng.choice(
                    [b"null\n", b"[]\n", b'{"kind": 3}\n', b"\xff\xfe\n", b"[" * 90_000 + b"\n"]
                )
    path.write_bytes(b"".join(found))
    return False


def tensors(case: Case) -> bool:
    """The header of a file of tensors forged, or its numbers."""
    path = case.pick("*.safetensors")
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    if case.rng.random() < 0.4:
        start = case.rng.randrange(0, len(data) - 8, 4)
        data[start : start + 4] = case.rng.choice(
            [b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f"]
        )
        text = content[8 : 8 + length]
    else:
        text = _text(_forged(case, header))
    size = case.rng.choice([2**63, 2**64 - 1, 10**8, 0, 1]) if case.rng.random() < 0.1 else len(text)
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return _signed(case, path)


def sign(checkpoint: Path) -> Manifest:
    """Write a manifest that vouches for whatever lies there."""
    files = {}
    for path in checkpoint.iterdir():
        if path.name != MANIFEST:
            content = path.read_bytes()
            files[path.name] = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    forged = Manifest(int(checkpoint.name.removeprefix("step-")), files)
    (checkpoint / MANIFEST).write_bytes(forged.to_bytes())
    return forged


def _signed(case: Case, path: Path) -> bool:
    """Most times: sign a checkpoint anew with what lies there, in the journal too."""
    manifest = path.parent / MANIFEST
    if case.rng.random() < 0.2 or not manifest.exists() or path == manifest:
        return False
    forged = sign(path.parent)
    step, log, kept = forged.step, case.folder / "journal.jsonl", []
    if not log.exists():
        return True
    for line in log.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "checkpoint" and record["step"] == step:
            record |= {"digest": forged.digest, "checksum": journal.checksum(step, forged.digest)}
        kept.append(json.dumps(record))
    log.write_text("\n".join(kept) + "\n")
    return True


KINDS: tuple[Callable[[Case], bool], ...] = (
    *(bits, bits, overwritten, cut, appended, swapped, removed, special),
    *(added, pickles, fields, fields, fields, lines, tensors),
)
