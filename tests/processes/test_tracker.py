"""A resource tracker that is killed is followed by one that knows as much."""

import sys
from pathlib import Path

import pytest

from tests.subprocesses import Command

KILLED = """
import multiprocessing, os, signal, warnings
from multiprocessing import resource_tracker
from lockstep.processes.tracker import remember_resources
def child(lock):
    with lock:
        print("held", flush=True)
if __name__ == "__main__":
    warnings.simplefilter("default")
    {call}
    context = multiprocessing.get_context("forkserver")
    locks = [context.Lock() for _ in range(5)]
    del locks[3]
    tracker = resource_tracker._resource_tracker._pid
    os.kill(tracker, signal.SIGKILL)
    os.waitid(os.P_PID, tracker, os.WEXITED | os.WNOWAIT)
    locks.append(context.Lock())
    del locks[2]
    process = context.Process(target=child, args=(locks[0],))
    process.start()
    process.join()
"""


@pytest.mark.parametrize(("call", "quiet"), [("remember_resources(); remember_resources()", True), ("pass", False)])
def test_nothing_is_said_of_what_the_killed_one_knew(tmp_path: Path, call: str, quiet: bool) -> None:
    script = tmp_path / "parent.py"
    script.write_text(KILLED.format(call=call))
    ended = Command(sys.executable, str(script)).end(60)
    assert ended.code == 0, ended.text
    assert ended.out == "held\n"
    assert ended.err.count("unexpectedly, relaunching") == 1, ended.text
    assert ("KeyError" not in ended.err and "leaked" not in ended.err) == quiet, ended.text
