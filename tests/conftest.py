"""What every test starts from: no launcher's variables, no data folder but the real one that a test asks for."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from lockstep.distributed import proc
from tests import warm

# A test that runs inside somebody's job must not take it for its own, nor find data that a stranger's machine lacks.
_LAUNCHERS = ("TORCHELASTIC_", "TORCH_ELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_")
_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "LOCKSTEP_DATA", "OMP_NUM_THREADS",
)  # fmt: skip
_HIDDEN = {name: os.environ[name] for name in os.environ if name in _VARIABLES or name.startswith(_LAUNCHERS)}
for _name in _HIDDEN:
    del os.environ[_name]
# as a shell starts background jobs; every child would inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# A machine may be several times as slow as another: what begins after so many seconds is skipped, and says so. Then the
# files come in another order for each seed, so that it is not always the same ones.
_BUDGET_S, _SEED = os.environ.get("LOCKSTEP_TESTS_SECONDS"), os.environ.get("LOCKSTEP_FUZZ_SEED", "0")
_BEGAN = time.monotonic()

# The same examples for the same test: what a draw finds by luck must not decide whether somebody else's change passes.
# No deadline of a test's time: machines are busy at times. Other examples each time: `--hypothesis-profile random`.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("lockstep", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("lockstep")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Share a folder's tests out over two processes, file by file: alone they leave cores idle.

    Those with real launchers over three, since they wait more than they compute. Not where files or other markers are
    named: those tests may be few, or want the machine to themselves.
    """
    option = config.option
    folders = all(Path(place).is_dir() for place in config.args)
    many = folders and option.markexpr.startswith(("not ", "slow", "integration"))
    alone = option.usepdb or option.collectonly or proc.cores() < 2 or "PYTEST_XDIST_WORKER" in os.environ
    if many and not alone and config.pluginmanager.hasplugin("xdist") and option.numprocesses is None:
        option.numprocesses, option.dist = 2 + option.markexpr.startswith("integration"), "loadfile"
        option.loadscopereorder = option.markexpr.startswith("integration")  # else as sorted below


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process have all files whose tests start Slurm's daemons."""
    if not config.option.markexpr.startswith("integration"):
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            text = (config.rootpath / file).read_text(encoding="utf-8")
            return "Slurm" if "tests.slurm" in text else file

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)  # of those that are left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, by `slow(SECONDS)` and else by tests: begun last, one would leave a core
    idle. With a budget, begin those that name no seconds with another file for each seed.
    """
    sizes = Counter(item.path for item in items)
    long = Counter[Path]()
    for item in items:
        long[item.path] += sum(sum(mark.args) for mark in item.iter_markers("slow"))
    files = list(sizes)
    first = int(_SEED) % len(files) if _BUDGET_S and files else 0
    files = [*files[first:], *files[:first]]
    files.sort(key=lambda file: (long[file], 0 if _BUDGET_S else sizes[file]), reverse=True)
    place = {file: number for number, file in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what the budget leaves no time for."""
    if _BUDGET_S and time.monotonic() - _BEGAN > float(_BUDGET_S):
        pytest.skip(f"the {_BUDGET_S} s of this run are over")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server of warm processes import while the first tests run, where others will ask for it."""
    if {"tests.ranks", "tests.subprocesses"} & sys.modules.keys() and not session.config.option.collectonly:
        warm.server()
    _one_thread()


def _one_thread() -> None:
    """On a busy machine two threads wait for each other, and burn both cores meanwhile."""
    if torch := sys.modules.get("torch"):  # imported here it would cost seconds to tests that do without
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    """Put back what a test changed for the whole process: environment, current folder, import path, torch's state."""
    environment, folder, path = dict(os.environ), Path.cwd(), list(sys.path)
    yield
    for name in set(os.environ) - set(environment) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    _one_thread()
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
        if torch.are_deterministic_algorithms_enabled():  # the call imports torch._inductor
            torch.use_deterministic_algorithms(False)
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ends_what_it_started() -> Iterator[None]:
    """A test that failed in the midst leaves a command running, and open files that would fail a later test."""
    commands = sys.modules.get("tests.subprocesses")
    before = [*commands.UNENDED] if commands else []
    yield
    for command in [each for each in commands.UNENDED if each not in before] if commands else ():
        command.end(0)


@pytest.fixture
def real_data() -> Path:
    """The folder with the official MNIST and CIFAR-10 files (`python tests/fetch_real_data.py DIR` makes one)."""
    folder = _HIDDEN.get("LOCKSTEP_DATA", "")
    if not folder:
        pytest.skip("LOCKSTEP_DATA names no folder with MNIST/raw and cifar-10-batches-bin")
    if missing := [name for name in ("MNIST/raw", "cifar-10-batches-bin") if not Path(folder, name).is_dir()]:
        pytest.skip(f"LOCKSTEP_DATA={folder} has no {' and no '.join(missing)}")
    return Path(folder).absolute()
