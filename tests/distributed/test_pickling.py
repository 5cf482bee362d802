"""What is defined where no file can be imported, as in a notebook's cell, on its way to workers and back."""

import importlib
import pickle
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.distributed.pickling import Work, pickled
from lockstep.errors import UserError
from tests.subprocesses import Command

# As in a notebook: no main module that could be imported, and a thread, with which nothing can be forked.
CONSOLE = """
import linecache, threading

cell = '''
import torch
import lockstep as ls
from lockstep.config import Execution

class Point:
    def __init__(self, x):
        self.x = x

FACTOR = 3

def double(x):
    return 2 * x

def work(world, point):
    total = int(world.sum(torch.tensor(world.rank + 1)))
    return type(point) is Point, Point(FACTOR * double(point.x) + total)

def fails(world):
    if world.rank == 1:
        raise ValueError("a mistake on rank 1 alone")
'''
linecache.cache["<cell 1>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell 1>")
exec(compile(cell, "<cell 1>", "exec"))

if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    cpu = Execution(device="cpu", threads=1)
    for nproc in 1, 2:
        values = ls.launch(work, Point(5), nproc=nproc, execution=cpu)
        print([same for same, _ in values], [type(point) is Point for _, point in values], values[-1][1].x)
    try:
        ls.launch(fails, nproc=2, execution=cpu)
    except ls.WorkerFailed as failed:
        print(failed)
        print(failed.trace)
"""


def test_what_a_console_defines_runs_in_other_processes(tmp_path: Path) -> None:
    ended = Command(sys.executable, "-c", CONSOLE, cwd=tmp_path, warm=True).end(timeout=180)
    assert ended.code == 0, ended.text
    lines = ended.out.splitlines()
    assert lines[:3] == [
        "[True] [True] 31",
        "[True, True] [True, True] 33",
        "rank 1: ValueError: a mistake on rank 1 alone",
    ]
    assert '    raise ValueError("a mistake on rank 1 alone")' in ended.out, "the text of the cell"
    assert not ended.orphans


CELL = """
import threading
lock = threading.Lock()
def train(world, n): return n + 1
def bad(world): return lock
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A main module without a file, in which a cell has defined `train`."""
    main = ModuleType("__main__")
    exec(CELL, main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def opened(work: Work) -> Any:
    """As in the process that gets it."""
    return pickle.loads(pickle.dumps(work))


def test_a_function_of_a_module_goes_by_its_name() -> None:
    work = Work(threading.active_count, (1, "two"))
    assert opened(work) == work
    assert b"cloudpickle" not in pickle.dumps(work)


def test_a_function_of_a_cell_goes_by_value(notebook: ModuleType) -> None:
    sent = pickle.dumps(Work(notebook.train, (1,)))
    del notebook.train
    sys.modules["__main__"].__dict__.clear()
    work = pickle.loads(sent)
    assert work.fn(None, *work.args) == 2


def test_what_is_defined_inside_a_function_goes_by_value() -> None:
    n = 3
    assert opened(Work(lambda world: n + 1, ())).fn(None) == 4


def test_what_can_not_be_copied_is_named(notebook: ModuleType) -> None:
    with pytest.raises(UserError, match=r"(?s)can't send bad and its .*lock.*make what can't be copied inside"):
        pickle.dumps(Work(notebook.bad, ()))
    with pytest.raises(UserError, match=r"can't send active_count and its arguments .*lock"):
        pickle.dumps(Work(threading.active_count, (threading.Lock(),)))


def test_without_cloudpickle_it_says_what_to_do(notebook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=ImportError("cloudpickle")))
    with pytest.raises(
        UserError, match=r"(?s)can't send train .*they can't import .*pip install 'lockstep-torch\[notebook\]'"
    ):
        pickle.dumps(Work(notebook.train, (1,)))
    with pytest.raises(UserError, match=r"(?s)can't send .*<lambda>.*write it to a file and import it"):
        pickle.dumps(Work(lambda world: 1, ()))
    assert opened(Work(threading.active_count, ())).fn is threading.active_count


def test_a_value_that_nothing_can_pickle_is_an_error() -> None:
    importlib.import_module("cloudpickle")
    with pytest.raises(TypeError, match="lock"):
        pickled(threading.Lock())
