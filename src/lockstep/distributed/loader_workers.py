"""Processes that read batches for this one, each one request at a time.

A batch comes over a socket, into memory of its receiver's own: it needs no room in /dev/shm, whatever its size, and at
19 MB takes half the time of shared files, which are faulted in page by page on both sides. A worker that is killed is
started again and gets its request again: an answer depends on nothing else.
"""

import io
import itertools
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.objects import exit_error
from lockstep.distributed import warm
from lockstep.distributed.failures import WorkerFailed, how_it_ended, last_line
from lockstep.distributed.pickling import sendable
from lockstep.errors import UserError

Task = Callable[[Any], tuple[Tensor, ...]]
_AHEAD = 2  # requests under way for each worker
_MOST_DEATHS = 3  # of workers at one request
_SHOWN = 5  # samples of a request, in a message
_keys = itertools.count()
_pools: "weakref.WeakSet[LoaderWorkers]" = weakref.WeakSet()


class LoaderWorkers:
    """`count` processes that call `task`, which pickle can take; `name`: of what they read. Started at first use.

    `pin`: tensors come in pinned memory.
    """

    def __init__(self, count: int, task: Task, name: str, pin: bool = False) -> None:
        remedy = "Define its class and functions at the top of a module, open files in __getitem__, or use --workers 0."
        pickled = sendable(task, f"{name} can't be handed to worker processes", remedy)
        self._workers = [_Worker(pickled, pin) for _ in range(count)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, "lockstep loader")  # one for each: an exchange holds a thread up
        _pools.add(self)
        weakref.finalize(self, _end, self._threads, self._workers).atexit = False

    def map(self, requests: Iterable[Any]) -> Generator[tuple[Tensor, ...], None, None]:
        """The task's answers, in the order of the requests, of which a few are made in advance.

        Raises UserError where workers are killed at one request again and again, and whatever the task raises.
        """
        warm.current()  # forked, where this process has no threads yet
        rest, submit = iter(requests), self._threads.submit
        answer_to = partial(_answer, self._idle)  # which holds nothing of this pool: it may go
        answers = deque(submit(answer_to, each) for each in islice(rest, _AHEAD * len(self._workers)))
        try:
            while answers:
                answer = answers.popleft().result()
                answers.extend(submit(answer_to, each) for each in islice(rest, 1))
                yield answer
        finally:
            for future in answers:
                future.cancel()


def running() -> list[tuple[str, int]]:
    """Name and pid of each loader worker of this process."""
    pids = [worker.pid for pool in list(_pools) for worker in pool._workers if worker.pid]
    return [(f"loader worker {number}", pid) for number, pid in enumerate(pids)]


def _end(threads: ThreadPoolExecutor, workers: "list[_Worker]") -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.close()


def _answer(idle: "SimpleQueue[_Worker]", request: Any) -> tuple[Tensor, ...]:
    """The task's answer to a request, by a worker that has nothing to do."""
    worker = idle.get()
    try:
        return worker.answer(request)
    finally:
        idle.put(worker)


class _Worker:
    """One of the processes, as its thread sees it."""

    def __init__(self, task: bytes, pin: bool) -> None:
        self.task, self.pin, self.pid, self.closed = task, pin, 0, False
        self.pipe: Connection | None = None

    def answer(self, request: Any) -> tuple[Tensor, ...]:
        """The task's answer; raises what the task raised, or UserError where workers die at the request."""
        deaths = 0
        while True:
            try:
                answer = self._exchange(request)
                break
            except (EOFError, ConnectionError):
                if self.closed:
                    raise
                how, deaths = self._end(), deaths + 1
                if deaths == _MOST_DEATHS:
                    raise UserError(
                        f"a loader worker {how}, {deaths} times in a row, reading {_shown(request)}",
                        "Out of memory: use fewer --workers. A crash: --workers 0 shows it in the run's own process.",
                    ) from None
                print(f"lockstep: a loader worker {how}; it is started again\n", end="", file=sys.stderr, flush=True)
        try:
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            del answer  # an error that this frame holds is part of a cycle, and would hold the pool

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.closed = True
        if self.pipe is not None:
            with suppress(OSError), _socket(self.pipe) as stream:
                stream.shutdown(socket.SHUT_RDWR)

    def _exchange(self, request: Any) -> tuple[Tensor, ...] | BaseException:
        """The task's answer, or what it raised."""
        pipe = self.pipe or self._start()
        pipe.send(request)
        described = pipe.recv()
        if isinstance(described, BaseException):
            return described
        tensors = [torch.empty(shape, dtype=dtype, pin_memory=self.pin) for dtype, shape in described]
        with _socket(pipe) as stream:
            for tensor in tensors:
                left = _bytes(tensor)
                while left:
                    count = stream.recv_into(left, len(left), socket.MSG_WAITALL)
                    if not count:
                        raise EOFError
                    left = left[count:]
        return tuple(tensors)

    def _start(self) -> Connection:
        self.key, self.server = next(_keys), warm.current()
        try:
            self.pipe = self.server.start(self.key, "loader", _answer_requests)
        except ConnectionError:  # the warm process was killed
            self.server = warm.current(lost=self.server)
            self.pipe = self.server.start(self.key, "loader", _answer_requests)
        while not self.pipe.poll(warm.LOOK_S):
            self.server.keep_awake()
        if isinstance(said := self.pipe.recv(), WorkerFailed):
            raise UserError(said.message)
        self.pid = said
        self.pipe.send(sys.path)  # it may have grown since the warm process was started
        self.pipe.send_bytes(self.task)
        return self.pipe

    def _end(self) -> str:
        """How it ended."""
        if self.pipe is not None:
            self.pipe.close()
        self.pipe, self.pid = None, 0
        return how_it_ended(self.server.exit_code(self.key))


def begin(task: Callable[[], Any]) -> Connection:
    """Have a process of its own call a task, which pickle can take; `result` has what came of it."""
    pickled = sendable(task, "it can't be handed to another process", "Define its class and functions in a module.")
    pipe = warm.current().start(next(_keys), "reader", _call)
    pipe.send(sys.path)
    pipe.send_bytes(pickled)
    return pipe


def result(pipe: Connection) -> Any:
    """What the task has returned; raises what it raised, and EOFError where its process was killed."""
    with pipe:
        found = pipe.recv()
    if isinstance(found, BaseException):
        raise UserError(found.message) if isinstance(found, WorkerFailed) else found
    return found


def _call(pipe: Connection, mask: set[int], _: Any) -> None:
    """What a process of `begin` does. Where memory runs out, it is the one to be killed."""
    _settle(mask)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        sys.path[:] = pipe.recv()
        with redirect_stdout(io.StringIO()):  # a second copy of what the run's own process has printed
            found = pickle.loads(pipe.recv_bytes())()
    except BaseException as error:
        found = _portable(error)
    with suppress(OSError):  # nobody waits for it any longer
        pipe.send(found)


def _settle(mask: set[int]) -> None:
    """A worker ends with its rank, and not before: that goes on to a step boundary when asked to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(os.getpid())  # of draws that nothing keys: no two workers' are alike


def _answer_requests(pipe: Connection, mask: set[int], _: Any) -> None:
    """What a worker does."""
    _settle(mask)
    try:
        pipe.send(os.getpid())
        sys.path[:] = pipe.recv()
        pickled, task = pipe.recv_bytes(), None
        with _socket(pipe) as stream:
            while True:
                request = pipe.recv()
                try:
                    task = task or pickle.loads(pickled)
                    tensors = task(request)
                except BaseException as error:
                    pipe.send(_portable(error))
                    continue
                pipe.send([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
                for tensor in tensors:
                    stream.sendall(_bytes(tensor))
    except (EOFError, OSError):  # nobody is left who asks
        os._exit(0)


def _portable(error: BaseException) -> BaseException:
    """An exception that pickle takes, with its traceback as a note."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):  # a user's code; its line is known here alone
        return exit_error(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        error = RuntimeError(last_line(error))
    if not isinstance(error, UserError):
        error.add_note(f"In a loader worker:\n{text}")
    return error


def _socket(pipe: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(pipe.fileno()))


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().flatten().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().data


def _shown(request: Any) -> str:
    """A request in a message: the first samples that it asks for."""
    numbers = np.asarray(request[0]).tolist()
    more = f" and {len(numbers) - _SHOWN:,} more" if len(numbers) > _SHOWN else ""
    return f"sample(s) {', '.join(map(str, numbers[:_SHOWN]))}{more}"
