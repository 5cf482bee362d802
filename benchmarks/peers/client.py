"""Starts sides as processes, compares their weights, and times them in turns."""

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import interleave

from peers import NEEDS
from peers.agree import Comparison, apart
from peers.task import Task

FOLDER = Path(__file__).parents[1]
_PROBE = """
import importlib.util, json, sys
print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n)]))
"""
_VERSIONS = """
import json, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
print(json.dumps({n: v for n in sys.argv[1:] if (v := version(n))}))
"""
_DISTRIBUTIONS = ("accelerate", "lightning", "pytorch-ignite", "timm", "torchvision")
_IDLE = 0.2  # most of a core that all waiting sides together may use


def _ask_python(python: str, program: str, *words: str) -> Any:
    return json.loads(subprocess.run([python, "-c", program, *words], capture_output=True, check=True).stdout)


def available(python: str, sides: Mapping[str, str]) -> list[str]:
    """Those of the sides (name -> module) whose packages that Python has; says which are left out."""
    found = _ask_python(python, _PROBE, *sorted({NEEDS[module] for module in sides.values()}))
    if missing := [name for name, module in sides.items() if NEEDS[module] not in found]:
        print(f"left out, since not installed (benchmarks/peers/requirements.txt): {', '.join(missing)}")
    return [name for name in sides if name not in missing]


def versions(python: str) -> dict[str, str]:
    """The peers' versions."""
    found: dict[str, str] = _ask_python(python, _VERSIONS, *_DISTRIBUTIONS)
    return found


class Peer:
    """A running side: as many processes as ranks, each blocked on its standard input while it is not asked."""

    def __init__(self, name: str, module: str, task: Task, python: str, compare: Mapping[str, int]) -> None:
        self.name, self.task = name, task
        self.folder = tempfile.TemporaryDirectory(prefix="lockstep-benchmark-")
        self.stderr = (Path(self.folder.name) / "stderr").open("w+")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.ranks = [self._start(rank, module, python, compare, port) for rank in range(task.ranks)]

    def _start(
        self, rank: int, module: str, python: str, compare: Mapping[str, int], port: int
    ) -> subprocess.Popen[str]:
        where = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": where, "OMP_NUM_THREADS": str(self.task.threads), "TERM": "xterm"}
        if self.task.ranks > 1:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.task.ranks),
                "LOCAL_WORLD_SIZE": str(self.task.ranks),
                "GROUP_RANK": "0",
                "TORCHELASTIC_RUN_ID": "benchmark",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            }
        words = [module, json.dumps(asdict(self.task)), json.dumps(compare), self.folder.name]
        command, pipe = [python, "-m", "peers.serve", *words], subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.stderr, text=True, env=environment)

    def ready(self) -> None:
        """Wait until it has built everything."""
        self._answers()

    def run(self, steps: int) -> float:
        """Seconds for so many steps, the slowest rank's."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"steps": steps}) + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> float:
        lines = []
        for process in self.ranks:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise RuntimeError(f"{self.name} failed:\n{self.said()}")
            lines.append(json.loads(line))
        if strange := [line["threads"] for line in lines if line["threads"] != self.task.threads]:
            raise RuntimeError(f"{self.name} uses {strange[0]} threads, and {self.task.threads} were given")
        return float(max(line["seconds"] for line in lines))

    def said(self) -> str:
        """The last lines of what its processes wrote."""
        return "\n".join(Path(self.stderr.name).read_text(encoding="utf-8", errors="replace").splitlines()[-30:])

    def weights(self, precision: str) -> dict[str, np.ndarray]:
        """Of the plain copy in that precision, after the steps that are compared."""
        with np.load(Path(self.folder.name) / f"{precision}.npz") as file:
            return dict(file)

    def cpu_seconds(self) -> float:
        """Processor time of its processes so far, and of their children's (Linux)."""
        pids = {process.pid for process in self.ranks}
        total = 0
        for pid, parent, ticks in sorted(_processes()):
            if pid in pids or parent in pids:
                pids.add(pid)
                total += ticks
        return total / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End its processes."""
        for process in self.ranks:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already
                process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.stderr.close()
        self.folder.cleanup()


def _processes() -> list[tuple[int, int, int]]:
    """(pid, parent's pid, ticks of processor time) of every process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # ended in the meantime
            continue
        found.append((int(entry.parent.name), int(fields[1]), int(fields[11]) + int(fields[12])))
    return found


@dataclass
class Race:
    """What came of one row."""

    steps: int  # of a timed segment
    seconds: dict[str, list[float]]  # of each round's segment
    apart: dict[str, float]  # distance of the compared weights from the raw loop's, over the way that those have gone
    apart_in_float64: dict[str, float]
    idle: float  # cores that all sides together used while none was asked


def _idle(peers: Sequence[Peer]) -> float:
    """Cores that the waiting sides use together; waits until loaders have filled their queues and threads sleep.

    Raises:
        RuntimeError: where they do not come to rest: every measurement would be disturbed.
    """
    used = {peer.name: 0.0 for peer in peers}
    for _ in range(10):
        before = {peer.name: peer.cpu_seconds() for peer in peers}
        time.sleep(1)
        used = {peer.name: peer.cpu_seconds() - before[peer.name] for peer in peers}
        if sum(used.values()) <= _IDLE:
            return sum(used.values())
    raise RuntimeError(f"waiting sides keep cores busy: { {n: u for n, u in used.items() if u} }")


def race(
    sides: Mapping[str, tuple[str, Task]],
    python: str,
    rounds: int,
    *,
    compare: Comparison,
    steps: int = 0,
    seconds: float = 0.0,
    warmup: int = 1,
) -> Race:
    """Start all sides, compare their weights with those of the first, and time them in turns.

    Args:
        sides: name -> (module, task); the first is the raw loop that the others are compared with.
        python: the interpreter that has the peers.
        rounds: timed rounds, each with a segment of every side; 0: weights are compared, and that is all.
        compare: after how many steps the plain copies' weights must be equal, and how nearly.
        steps: of a segment; 0: as many as take the first side `seconds`.

    Raises:
        RuntimeError: where a side fails, its weights are others, or a waiting side keeps a core busy.
    """
    peers: dict[str, Peer] = {}
    first = next(iter(sides))
    try:
        for name, (module, task) in sides.items():
            peers[name] = Peer(name, module, task, python, compare.asked(task.precision))
            peers[name].ready()  # one by one: at once, the threads of their compared steps collide
        task = sides[first][1]
        exactly, nearly = (
            apart(task, {name: peer.weights(precision) for name, peer in peers.items()}, precision, compare)
            for precision in compare.asked(task.precision)
        )
        if not rounds:
            return Race(0, {}, nearly, exactly, 0.0)
        for peer in peers.values():
            peer.run(2)
        if not steps:
            steps = max(1, round(seconds * 2 / peers[first].run(2)))
        idle = _idle(list(peers.values()))
        workers = any(task.workers and task.data != "tensors" for _, task in sides.values())

        def settled(peer: Peer) -> float:
            if workers:
                time.sleep(0.05)  # the loaders of the side before fill their queues, which are bounded, and then sleep
            return peer.run(steps)

        figures = interleave({n: lambda p=p: settled(p) for n, p in peers.items()}, rounds, warmup)  # type: ignore[misc]
        return Race(steps, figures, nearly, exactly, idle)
    finally:
        for peer in peers.values():
            peer.close()
