"""The course's programs, run as torchrun runs them, and without its import of torch in every process."""

import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

from torch.distributed import TCPStore

import consequences
from tests.subprocesses import Command, Completed

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "examples/course"
PAGES = (ROOT / "docs/course", ROOT / "docs/zh/course")


@cache
def run(step: str, n: int, flags: tuple[str, ...] = ()) -> str:
    """What a step's program says on n processes: rank 0's output, all others silent and all successful.

    Of step 4's wrong way, which has to fail, what it says of that.
    """
    with tempfile.TemporaryDirectory() as folder:
        if first := consequences.before(flags):
            outputs(step, n, first, Path(folder))
        return outputs(step, n, flags, Path(folder))


def outputs(step: str, n: int, flags: tuple[str, ...], cwd: Path) -> str:
    """What rank 0 prints, or of what has to fail its errors."""
    if consequences.to_fail(step, flags):
        with taken(consequences.PORT):
            (ended,) = start(step, n, *flags, cwd=cwd)
        assert ended.code, ended.text
        return ended.err
    ranks = start(step, n, *flags, cwd=cwd)
    for rank, ended in enumerate(ranks):
        assert ended.code == 0, f"rank {rank} of {n}: {ended.text}"
        assert not ended.orphans, ended.text
        if step == "01":  # which knows nothing of other processes
            assert ended.out == ranks[0].out
        else:
            assert rank == 0 or not ended.out, f"rank {rank} of {n} prints too: {ended.text}"
    return ranks[0].out


def start(step: str, n: int, *flags: str, cwd: Path = PROGRAMS) -> list[Completed]:
    """The n processes of a program, ended, by rank; where it starts them itself, only the first."""
    if step in consequences.OWN_LAUNCHER:
        return end(consequences.commands(step, n, flags), [{"OMP_NUM_THREADS": "1"}], cwd)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=180))
    here = n // consequences.machines(step, n)
    base = {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [{**base, "RANK": str(rank), "LOCAL_RANK": str(rank % here)} for rank in range(n)]
    return end([[str(consequences.program(step)), *flags]] * n, ranks, cwd)


def end(argvs: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], cwd: Path) -> list[Completed]:
    """Python's processes of one job, begun together; all ended."""
    begun = [
        Command(sys.executable, *argv, cwd=cwd, env=dict(env), warm=True) for argv, env in zip(argvs, envs, strict=True)
    ]
    return [command.end(timeout=180) for command in begun]


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Somebody listens on the port: this process, if nobody else does already."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of earlier tests' ended connections
        with suppress(OSError):
            other.bind(("localhost", port))
            other.listen()
        yield
