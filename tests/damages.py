"""Thousands of damaged run folders: `python -m tests.damages --count 10000 --seed 1`.

A folder that a real run left, of replicas or of sharded weights, is damaged somewhere: bits, cuts, swaps, fields that
nobody wrote, special files, pickles. Then the command itself goes on with it, evaluates or exports it, in this
process. It must say so in a sentence and end with exit code 2, or leave what the undamaged folder leaves. Where a
forger has signed anew what he forged, other values may come of it, as of any other file; a traceback, a hang and
running code may not. Exit code 1: one of these came.
"""

import argparse
import contextlib
import hashlib
import io
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import cli
from tests import journals
from tests.damage_kinds import KINDS, Case
from tests.pickles import pickled

_RUN = "digits --model mlp --threads 1 --fraction 0.05 --batch-size 48 --ema 0.9 --schedule constant"
_LIMIT_S = 600  # far more than an answer takes on a busy machine; a hang is for good
_SHARED_MEMORY = Path("/dev/shm")  # checkpoints wait for their disk
_SENTENCE = re.compile(r"lockstep: [^\n]+(\n {4}[^\n]*)*\n {2}\S[^\n]*\n")


@dataclass
class Tally:
    """What came of the damages."""

    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Hung(BaseException):
    """No answer in time."""


def damage(count: int, seed: int, place: Path, say: Callable[[str], None] = print, only: str = "") -> Tally:
    """Try so many damages below a folder; `only` of the kinds with these names, between commas."""
    kinds = [kind for kind in KINDS if not only or kind.__name__ in only.split(",")]
    bases = {strategy: _trained(place / strategy, strategy) for strategy in ("ddp", "fsdp")}
    wanted: dict[str, dict[str, str]] = {}
    for strategy, base in bases.items():
        shutil.copytree(base, place / "whole")
        wanted[strategy] = {
            action: _outcome(action, place / "whole", strategy)[1] for action in ("eval", "export", "resume")
        }
        _clear(place / "whole")
    tally = Tally()
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        strategy, kind = rng.choice(list(bases)), rng.choice(kinds)
        case = Case(place / "run", rng, place / "executed", place / "elsewhere")
        shutil.copytree(bases[strategy], case.folder)
        case.elsewhere.mkdir()
        signed, where = kind(case), kind.__name__
        action = rng.choice(_ACTIONS[case.part()])
        try:
            outcome, left = _outcome(action, case.folder, strategy)
        except (Exception, Hung) as error:
            outcome, left = f"{type(error).__name__}", "".join(traceback.format_exception(error))[-1500:]
        if case.sentinel.exists():
            outcome = "code ran"
        if outcome == "done":
            outcome = (
                "harmless" if left == wanted[strategy][action] else "taken as signed" if signed else "other result"
            )
        tally.kinds[where] += 1
        tally.outcomes[outcome] += 1
        if outcome == "refused":
            tally.sentences[_generic(left, place)] += 1
        elif outcome not in ("harmless", "taken as signed"):
            text = f"seed {seed}, damage {number} ({where} of {case.damaged}, {strategy}, {action}): {outcome}: {left}"
            tally.failures.append(text)
            say(text)
        for path in (case.folder, case.elsewhere, case.sentinel):
            _clear(path)
    return tally


# what may be done with a folder by what was damaged in it
_ACTIONS = {"checkpoints": ["resume"], "weights": ["eval", "export", "resume"], "": ["eval", "resume"]}


def _run(strategy: str) -> str:
    """The flags of a run. Exact mode, whose bits are the same on one process, goes with DDP alone."""
    return f"{_RUN} --exact 2" if strategy == "ddp" else f"{_RUN} --strategy {strategy}"


def _trained(folder: Path, strategy: str) -> Path:
    words = f"train {_run(strategy)} --nproc 2 --epochs 2 --checkpoint-every 1epoch --out {folder}"
    code, text = _command(words.split())
    if code != 0:
        raise AssertionError(text)
    return folder


def _outcome(action: str, folder: Path, strategy: str) -> tuple[str, str]:
    """`done` and what was left, or `refused` and the sentence; else what went wrong, and all that was printed."""
    exported, nproc = folder.with_name("exported"), 1 if strategy == "ddp" else 2
    words = {
        "resume": f"train {_run(strategy)} --nproc {nproc} --epochs 3 --override epochs --checkpoint-every 1epoch "
        f"--out {folder}",
        "eval": f"eval {folder} --nproc 1 --threads 1",
        "export": f"export {folder} --weights final --out {exported}",
    }[action]
    try:
        code, text = _command(words.split())
        if code == 2:
            return ("refused" if _SENTENCE.fullmatch(text) else "no sentence"), text
        if code != 0:
            return f"exit code {code}", text
        if action == "export":
            return "done", hashlib.sha256(exported.read_bytes()).hexdigest()
    finally:
        _clear(exported)
    if action == "eval":
        return "done", text.partition(": ")[2]
    end = journals.read(folder / "journal.jsonl")[-1]
    return "done", str([end[name] for name in ("weights_sha256", "ledger_sha256", "top1", "loss", "steps", "samples")])


def _command(words: list[str]) -> tuple[int, str]:
    """Exit code and output of `lockstep WORDS` in this process; of a refusal what is on standard error."""

    def hung(*_: Any) -> None:
        raise Hung(f"no answer in {_LIMIT_S} s")

    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(_LIMIT_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, err.getvalue() if code == 2 else out.getvalue() + err.getvalue()


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _generic(sentence: str, place: Path) -> str:
    """The sentence without names and numbers, so that one refusal is counted once."""
    line = sentence.splitlines()[0].replace(str(place), "")
    line = re.sub(r"'[^']*'|\[[^]]*\]", "'...'", line)
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", line)[:110]


def canary_sings(place: Path) -> bool:
    """Whether the pickles do what they are meant to, where somebody reads them."""
    for seed in range(8):
        case = Case(place, random.Random(seed), place / "executed", place)
        content = pickled(case.rng, case.sentinel)
        if content.startswith(b"\x80") and b"torch" not in content[:64] and not content.startswith(b"\x80\x02\x8a"):
            pickle.loads(content)
            if not case.sentinel.exists():
                return False
            case.sentinel.rmdir()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="of these kinds, as fields,tensors")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as place:
        os.chdir(place)
        if not canary_sings(Path(place)):
            raise AssertionError("a pickle that nobody could catch")
        tally = damage(given.count, given.seed, Path(place).resolve(), lambda text: print(text, flush=True), given.only)
        os.chdir("/")
    print(f"{tally.kinds.total()} damages of {len(tally.kinds)} kinds: {dict(tally.outcomes)}")
    for sentence, count in tally.sentences.most_common():
        print(f"  {count} x {sentence}")
    print(f"{len(tally.failures)} neither found out nor harmless")
    return bool(tally.failures)


if __name__ == "__main__":
    sys.exit(main())
