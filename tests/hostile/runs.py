"""Run a case on several numbers of processes, as a user would, and judge what came out."""

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.hostile.cases import FEATURES, Case
from tests.subprocesses import _LAUNCHER, Forked
from tests.warm import Server, executed, server

PLAIN = Path(__file__).with_name("plain.py")
HASH = "PYTHONHASHSEED"
RIGHT = ("equal", "warned", "refused", "broken")
DEADLINE_S = 180.0  # a busy machine takes long to start interpreters
TRAIN = ("--device", "cpu", "--out", ".", "--hang-timeout", "60", "--max-restarts", "0")
TOLERANCE = 1e-8  # of models in float64; rounding alone is about 1e-13 after 14 steps
# regular output of a command; what else it prints is something that it had to say
REGULAR = re.compile(
    r"digits: case:make_model on |listening: |epoch #/#(: |  )|test accuracy |trained in |run folder |"
    r"exact mode: # ?slices|--exact # takes one slice after the other|note: weight decay leaves |class weights: |"
    r"mixup # ?mix |lockstep: # ?batch norm layer|an epoch is # ?images|"
    r"(std|var)\(\): degrees of freedom|"  # torch's, of a single sample
    r"note: the loss runs away"  # it tells of the weights, which differ where something else was said
)
RESUME = "note: no checkpoint holds "  # of a run that is resumed, not of N: no alarm, and the same words on every N
# of torch and Python, not of Lockstep: warnings with the line of code below
FOREIGN = re.compile(
    r"^\[rank\d+\]:\[W.*\n|^\S+(site-packages/(?!lockstep)\S+: \w+|: UserWarning: Full backward hook is).*\n(  .*\n)?",
    re.M,
)
WARNED = re.compile(r"^\S+:\d+: \w+: (.*)\n  .*$", re.M)
# the end of a loop of the user's own by a mistake of its own, and not by a process that is gone
SENTENCE = re.compile(r"^lockstep: (?!.*(?:killed by|ended (?:by|with)|is gone|lost another rank))", re.M)
OURS = (
    r"lockstep\.(?:\w+\.)*(?:UserError|WorkerFailed: rank \d+): (?!killed by)"  # what comes before a refusal in a loop
)

_STARTS: dict[tuple[int, str], Server] = {}
_STARTING = threading.Lock()


@dataclass(frozen=True)
class Run:
    """One run: its exit code (-9 where the deadline killed it), what it said, and the tensors that it left."""

    processes: int
    code: int
    text: str
    tensors: dict[str, torch.Tensor]
    usual: frozenset[str] = frozenset()  # sentences that are no news: those of a plain model

    @property
    def end(self) -> str:
        """How it ended: done, refused (by a sentence of its own), crash (any other error) or hang."""
        if self.code in (-9, 124):
            return "hang"
        traces = self.text.count("Traceback (most recent call last)")
        if (
            traces
        ):  # a loop of the user's own: the launcher's own trace is followed by the sentence, or by the rank's trace
            return "refused" if traces == 1 and re.search(rf"^{OURS}", self.text, re.M) else "crash"
        refused = self.code == 2 or (self.code == 1 and SENTENCE.search(self.text))
        return "refused" if refused else "crash" if self.code else "done"

    @property
    def said(self) -> frozenset[str]:
        """Its sentences, without numbers, paths and counts of processes. Of a traceback the last one."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text).replace("\r", "\n")
        text = re.sub(rf"^Traceback.*?^(?=[\w.]+: )(?:{OURS})?", "", text, flags=re.M | re.S)
        text = WARNED.sub(r"\1", FOREIGN.sub("", text))
        lines = [neutral(line) for line in text.splitlines()]
        return frozenset(line for line in lines if line and not REGULAR.match(line)) - self.usual


def neutral(line: str) -> str:
    """A sentence as it would be for any number of processes, in any folder."""
    line = re.sub(r"(?<![\w.])(~|\.)?/[\w./-]+", "PATH", line)
    line = re.sub(r"\brank \d+: ", "", line)
    line = re.sub(r"(?<![A-Za-z_])[-+]?\d+(\.\d+)?(e[-+]?\d+)?(?![A-Za-z_])( ?%)?", "#", line, flags=re.I)
    return re.sub(r"\b(process|rank|sample|step|time)(es|s)?\b(\((es|s)\))?", r"\1", line).strip()


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of RIGHT, or silent, words, false alarm, crash, hang or moved by the comparisons of steps."""

    kind: str
    difference: (
        float  # the largest of any tensor, relative to its largest value; infinite where there is nothing to compare
    )
    where: str
    said: dict[int, frozenset[str]]

    @property
    def right(self) -> bool:
        return self.kind in RIGHT

    def names(self, words: set[str]) -> bool:
        """Whether one of the words stands in what was said, on every N."""
        return all(words & set(re.findall(r"\w+", " ".join(lines))) for lines in self.said.values())

    @property
    def story(self) -> str:
        sentences = [f"      N = {n}: {line[:300]}" for n, lines in self.said.items() for line in sorted(lines)]
        return "\n".join([f"{self.kind}, difference {self.difference:.2g} {self.where}", *sentences])


def judge(runs: list[Run], exact: bool = False, equal: bool | None = None) -> Verdict:
    """The law: equal up to rounding (in exact mode to the bit) and nothing said, or all say the same.

    `equal`: what is known of it from elsewhere.
    """
    said = {run.processes: run.said for run in runs}
    warned = [any(not line.startswith(RESUME) for line in lines) for lines in said.values()]
    same = len(set(said.values())) == 1
    difference, where = differences(runs)
    if equal is None:
        equal = difference == 0 if exact else difference < TOLERANCE
    ends = {run.end for run in runs}
    if "hang" in ends or "crash" in ends:
        kind = "hang" if "hang" in ends else "crash"
    elif equal and ends == {"done"}:
        kind = "false alarm" if any(warned) else "equal" if same else "words"
    elif not all(warned):
        kind = "silent"
    elif len(ends) > 1 or not same:
        kind = "words"
    else:
        kind = "warned" if ends == {"done"} else "refused"
    return Verdict(kind, difference, where, said)


def differences(runs: list[Run]) -> tuple[float, str]:
    """The largest difference to the first run, and in which tensor."""
    first, largest = runs[0].tensors, (0.0, "")
    for run in runs[1:]:
        if run.tensors.keys() != first.keys() or not first:
            return float("inf"), "(there are not the same tensors)"
        largest = max([largest, *((apart(first[name], run.tensors[name]), name) for name in first)])
    return largest


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference of two tensors, relative to the largest value; of values that are all small to 0.001."""
    if one.shape != other.shape:
        return float("inf")
    if one.equal(other) or not one.numel():
        return 0.0
    one, other = one.to(torch.complex128), other.to(torch.complex128)
    finite = one.isfinite() & other.isfinite()
    if not torch.equal(one.isnan(), other.isnan()) or not (finite | one.isnan() | (one == other)).all():
        return float("inf")
    gap = (one - other)[finite].abs()
    return float(gap.max() / one[finite].abs().max().clamp(min=1e-3)) if gap.numel() else 0.0


def execute(folder: Path, args: list[str], start: Server | None = None) -> tuple[int, str]:
    """`python ARGS` in a folder, as from a user's shell: exit code, and what it printed.

    `start`: of the interpreter, where it matters which.
    """
    start = start or server()
    env = {k: v for k, v in os.environ.items() if k not in (*_LAUNCHER, HASH, "PYTHONWARNINGS")}
    env |= {"COLUMNS": "400", "NO_COLOR": "1"} | {k: v for k, v in start.loaded_with.items() if k == HASH}
    with (folder / "output.txt").open("w+") as out, Path(os.devnull).open() as nothing:
        fds = {0: nothing.fileno(), 1: out.fileno(), 2: out.fileno()}
        process = Forked(start.start(args, fds, env, str(folder), session=True))
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = -9
        out.seek(0)
        return code, out.read()


def start_of(number: int, hash_seed: str) -> Server:
    """One of several starts of the interpreter: objects lie elsewhere, and without a seed texts hash otherwise."""
    with _STARTING:
        if (number, hash_seed) not in _STARTS:
            environ = {k: v for k, v in os.environ.items() if k != HASH}
            _STARTS[number, hash_seed] = executed(environ | ({HASH: hash_seed} if hash_seed else {}))
        return _STARTS[number, hash_seed]


def run(case: Case, folder: Path, processes: int, seed: int = 0, epochs: int = 2, law: str = "warn") -> Run:
    """The case on so many processes. `folder` gets a folder with the module, the output and the weights."""
    here = folder / f"{processes}-{seed}-{epochs}"
    (here / "weights").mkdir(parents=True)
    (here / "case.py").write_text(case.source().replace("seed=seed)", f'seed=seed, law="{law}")'))
    args = ["case.py", str(processes), str(here / "weights"), str(seed), str(epochs)]
    if not case.loop:
        args = ["-m", "lockstep", "train", "digits", *case.flags(), *("--nproc", str(processes), "--seed", str(seed))]
        args += ["--epochs", str(epochs), "--law", law, *TRAIN]
    # the command fixes how texts hash, and a script of the user's own does not; three runs, three starts
    start = start_of({1: 0, 3: 2}.get(processes, 1), "" if case.loop else "0") if case.fresh else None
    code, text = execute(here, args, start)
    file = here / "weights" / "final.safetensors"
    tensors = load_file(file) if file.exists() else {}
    journal = here / "journal.jsonl"
    if journal.exists():
        records = [json.loads(line) for line in journal.read_text().splitlines()]
        losses = [float(record["loss"]) for record in records if record["kind"] == "eval"]
        tensors["evaluation.loss"] = torch.tensor(losses, dtype=torch.float64)
    return Run(processes, code, text, tensors)


def check(case: Case, folder: Path) -> Verdict:
    """The verdict on a case, on 1, 2 and 3 processes.

    What was said of equal runs has to come true in longer ones, in other shares and from another seed, or where the
    last batch is another: a buffer that each batch overwrites is that of the last one. What fails in plain PyTorch as
    well is broken: no fault of Lockstep's.
    """
    runs = [run(case, folder, processes) for processes in (1, 2, 3)]
    if any(each.said for each in runs):
        runs = [replace(each, usual=usual(case.plain, each.processes)) for each in runs]
    verdict = judge(runs, bool(case.exact))
    if verdict.kind == "equal":
        difference, where = differences([runs[0], run(case, folder / "off", 1, law="off")])
        return verdict if difference < TOLERANCE else replace(verdict, kind="moved", difference=difference, where=where)
    if verdict.kind == "crash" and execute(folder / "1-0-2", [str(PLAIN), "case.py"])[0]:
        return replace(verdict, kind="broken")
    if verdict.kind == "false alarm":
        sized = tuple(name for name in case.features if FEATURES[name].kind != "size")
        for number, other in enumerate(dict.fromkeys([case, replace(case, features=sized)])):
            here = folder / f"longer-{number}"
            others = [run(other, here, n, seed=1, epochs=6) for n in (1, 3, 4 if case.exact else 7)]
            longer = judge(others, bool(case.exact))
            if longer.kind not in ("equal", "false alarm"):
                known = judge(runs, equal=False)
                return replace(known, difference=longer.difference, where=f"{longer.where} in longer runs")
    return verdict


@cache
def usual(plain: Case, processes: int) -> frozenset[str]:
    """What a plain model's run says."""
    with tempfile.TemporaryDirectory(prefix="hostile-plain-") as folder:
        found = run(plain, Path(folder), processes)
    return found.said if found.end == "done" else frozenset()
