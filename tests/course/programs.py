"""The course's programs, run as torchrun runs them, and without its import of torch in every process."""

import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path

from torch.distributed import TCPStore

import consequences
from tests.subprocesses import Command, Ended

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples/course"
PAGES = (ROOT / "docs/course", ROOT / "docs/zh/course")


def program(step: str) -> Path:
    """The program of a step, as "07"."""
    (path,) = PROGRAMS.glob(f"{step}-*.py")
    return path


@cache
def run(step: str, n: int, flags: tuple[str, ...] = ()) -> str:
    """What a step's program says on n processes: rank 0's output, all others silent and all successful.

    Of step 4's wrong way, which has to fail, what it says of that.
    """
    if consequences.to_fail(step, flags):
        with taken(consequences.PORT):
            (ended,) = start(step, n, *flags)
        assert ended.code, ended.text
        return ended.err
    ranks = start(step, n, *flags)
    for rank, ended in enumerate(ranks):
        assert ended.code == 0, f"rank {rank} of {n}: {ended.text}"
        assert not ended.orphans, ended.text
        if step == "01":  # which knows nothing of other processes
            assert ended.out == ranks[0].out
        else:
            assert rank == 0 or not ended.out, f"rank {rank} of {n} prints too: {ended.text}"
    return ranks[0].out


def start(step: str, n: int, *flags: str, cwd: Path = PROGRAMS, nodes: int = 1) -> list[Ended]:
    """The n processes of a program, ended, by rank; where it starts them itself, only the first.

    `nodes`: on how many pretended machines the n are.
    """
    if step in consequences.OWN_LAUNCHER:
        return end([consequences.command(step, n, flags)], [{"OMP_NUM_THREADS": "1"}], cwd)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    here = n // nodes
    base = {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [{**base, "RANK": str(rank), "LOCAL_RANK": str(rank % here)} for rank in range(n)]
    return end([[str(program(step)), *flags]] * n, ranks, cwd)


def end(argvs: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], cwd: Path) -> list[Ended]:
    """Python's processes of one job, begun together; all ended."""
    begun = [
        Command(sys.executable, *argv, cwd=cwd, env=dict(env), warm=True) for argv, env in zip(argvs, envs, strict=True)
    ]
    return [command.end(timeout=180) for command in begun]


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Somebody listens on the port: this process, if nobody else does already."""
    with socket.socket() as other:
        try:
            other.bind(("localhost", port))
            other.listen()
        except OSError:
            with nullcontext():
                pass
        yield
