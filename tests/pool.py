"""Worlds of ranks that stay, for many short runs: started once where tests/ranks.py starts them for each call."""

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch

from lockstep.config import Execution
from lockstep.distributed.failures import WorkerFailed
from lockstep.distributed.world import World
from tests.ranks import RankFailed, Ranks


class Pool:
    """`pool.start` is launcher.launch's stand-in on worlds that it keeps, one for each number of ranks.

    A world in which a rank fails is given up, and the next call makes another: its collectives no longer match.
    `single`: one world at a time, since processes keep the memory that a large model took. `hash_seeds`: texts hash
    otherwise on each number of ranks.
    """

    def __init__(self, timeout: float = 120.0, single: bool = False, hash_seeds: bool = False) -> None:
        self.timeout, self.single, self.hash_seeds = timeout, single, hash_seeds
        self.worlds: dict[int, _Held] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for size in list(self.worlds):
            self.worlds.pop(size).close()

    def run(self, fn: Callable[..., Any], n: int, *args: Any, threads: int = 1) -> list[Any]:
        """`fn(world, *args)` on n ranks; one value per rank. Raises RankFailed."""
        if n not in self.worlds:
            if self.single:
                self.close()
            self.worlds[n] = _Held(n, self.timeout, n if self.hash_seeds else None)
        try:
            return self.worlds[n].ask((threads, fn, args), self.timeout)
        except RankFailed:
            self.worlds.pop(n).close()
            raise

    def start(self, fn: Callable[..., Any], *args: Any, execution: Execution) -> list[Any]:
        """As launcher.launch has it."""
        try:
            return self.run(fn, int(execution.nproc), *args, threads=execution.threads or 1)
        except RankFailed as failed:
            raise WorkerFailed(0, str(failed), 1) from failed


class _Held:
    """The ranks of one world, each waiting at its end of a pipe."""

    def __init__(self, n: int, timeout: float, hash_seed: int | None) -> None:
        pairs = [Pipe() for _ in range(n)]
        self.pipes = [ours for ours, _ in pairs]
        self.ranks = Ranks(_answer, n, [theirs for _, theirs in pairs], timeout=timeout, hash_seed=hash_seed)
        for _, theirs in pairs:
            theirs.close()

    def ask(self, request: Any, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        values: dict[int, Any] = {}
        try:
            for pipe in self.pipes:
                pipe.send(request)
            while waiting := [pipe for rank, pipe in enumerate(self.pipes) if rank not in values]:
                ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RankFailed(f"no answer in {timeout} s")
                for found in ready:
                    assert isinstance(found, Connection)
                    rank = self.pipes.index(found)
                    ok, values[rank] = found.recv()
                    if not ok:
                        raise RankFailed(f"rank {rank} of {len(self.pipes)}: {values[rank]}")
        except (EOFError, BrokenPipeError) as error:
            raise RankFailed("a rank died without a word") from error
        return [values[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for pipe in self.pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
            pipe.close()
        self.ranks.close()


def _answer(world: World, pipes: list[Connection]) -> None:
    """What each rank does: requests as they come, in a process as a fresh one would find it."""
    import traceback

    pipe = pipes[world.rank]
    for other in pipes:
        if other is not pipe:
            other.close()
    while (request := pipe.recv()) is not None:
        threads, fn, args = request
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.manual_seed(0)
        try:
            answer = True, fn(dataclasses.replace(world), *args)
        except BaseException:
            answer = False, traceback.format_exc()
        with suppress(BrokenPipeError):
            pipe.send(answer)
        if not answer[0]:
            return
