"""One interpreter, two threads: Python code takes turns. Two processes: it runs at once.

python examples/concepts/gil.py
"""

import multiprocessing
import threading
import time
from typing import Any

ROUNDS = 20


def work(barrier: Any) -> None:
    """Pure Python, as a forward pass is between its kernels."""
    for _ in range(ROUNDS):
        barrier.wait()
        total = 0
        for i in range(200_000):
            total += i
        barrier.wait()


def timed(what: str, module: Any, kind: str, count: int) -> None:
    """Start `count` threads or processes; prints a round's best time, from a common start to the last one's end."""
    barrier = module.Barrier(count + 1)
    started = [getattr(module, kind)(target=work, args=(barrier,)) for _ in range(count)]
    for each in started:
        each.start()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        barrier.wait()
        barrier.wait()
        seconds.append(time.perf_counter() - begin)
    for each in started:
        each.join()
    print(f"{what}: {min(seconds) * 1000:.0f} ms")


if __name__ == "__main__":
    timed("one thread, one piece of work", threading, "Thread", 1)
    timed("two threads, two pieces", threading, "Thread", 2)
    timed("two processes, two pieces", multiprocessing.get_context("fork"), "Process", 2)
