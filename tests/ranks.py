"""Run a function on N real gloo processes and get a value per rank."""

import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

from torch.distributed import TCPStore

from lockstep.config import Execution

_CONTEXT = get_context("forkserver")
# torch is imported once, not once a rank; the first optimizer of a process would import torch._dynamo too
_CONTEXT.set_forkserver_preload(["lockstep.training.loop", "torch._dynamo"])


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60.0,
    threads: int = 1,
    env: dict[str, str] | None = None,
    law: bool = False,
) -> list[Any]:
    """`fn(world, *args)` on n ranks; returns one value per rank.

    `law`: steps are compared with themselves, as for users. On ranks that takes seven times as long as the steps, and
    has tests of its own; in the test's own process it is on.

    Raises:
        RankFailed: where a rank raised, died or outlived `timeout` seconds, naming the rank.
    """
    ranks = Ranks(fn, n, *args, timeout=timeout, threads=threads, env=env, law=law)
    try:
        return _collect(ranks.started, timeout)
    finally:
        ranks.close()


def alone(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(world, *args)` in this process, as the one rank that there is; its steps are not compared with themselves."""
    from lockstep.distributed.world import World
    from lockstep.training import self_check

    with mock.patch.object(self_check.SelfCheck, "due", return_value=False):
        return fn(World.single(), *args)


class Ranks:
    """`fn(world, *args)` begun on n ranks, as `run_ranks` has it. `started`: process and pipe of each."""

    def __init__(
        self,
        fn: Callable[..., Any],
        n: int,
        *args: Any,
        timeout: float,
        threads: int = 1,
        env: dict[str, str] | None = None,
        law: bool = True,
        hash_seed: int | None = None,
    ) -> None:
        """`hash_seed`: of interpreters of their own, where it is not to be the one that all others have."""
        context = _CONTEXT if hash_seed is None else get_context("spawn")
        # the parent holds the store, so that no port is found, let go and lost to somebody else
        self.store = TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        base = {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **(env or {}),
        }
        self.started: list[tuple[Any, Connection]] = []
        try:
            for rank in range(n):
                here, there = context.Pipe()
                mine = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = context.Process(target=_rank, args=(there, mine, threads, timeout, law, fn, args))
                with mock.patch.dict(os.environ, {} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}):
                    process.start()
                there.close()
                self.started.append((process, here))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End what is left of them."""
        for process, pipe in self.started:
            process.kill()
            process.join()
            pipe.close()


def _collect(ranks: list[tuple[Any, Connection]], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    values: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}

    def take(seconds: float) -> None:
        for pipe in wait(list(waiting), timeout=seconds):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                when, ok, value = pipe.recv()
            except EOFError:
                when, ok, value = time.time(), False, "died without a word"
            if ok:
                values[rank] = value
            else:
                failures.append((when, rank, value))

    while waiting and not failures:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RankFailed(f"no answer from rank(s) {sorted(waiting.values())} in {timeout} s")
        take(left)
    if failures:
        time.sleep(0.05)  # where one rank fails, the others lose their peer: let the first cause arrive too
        take(0)
        _, rank, text = min(failures)
        raise RankFailed(f"rank {rank} of {len(ranks)}: {text}")
    return [values[rank] for rank in range(len(ranks))]


def _rank(
    pipe: Connection,
    env: dict[str, str],
    threads: int,
    timeout: float,
    law: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(env)
    from lockstep.distributed.warm import prepare
    from lockstep.distributed.world import join
    from lockstep.training import self_check

    prepare()
    if not law:
        self_check.SelfCheck.due = lambda self: False  # type: ignore[method-assign]
    answer: tuple[float, bool, Any]
    try:
        with join(Execution(device="cpu", threads=threads, collective_timeout=timeout)) as world:
            answer = time.time(), True, fn(world, *args)
    except BaseException:
        answer = time.time(), False, traceback.format_exc()
    with suppress(BrokenPipeError):  # the parent has heard enough
        pipe.send(answer)
    pipe.close()
