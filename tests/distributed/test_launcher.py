"""Real local workers, and those that another launcher started."""

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lockstep.config import Execution, Recovery
from lockstep.distributed.devices import process_count
from lockstep.distributed.launcher import launch
from lockstep.distributed.proc import cores, stopped
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests.subprocesses import Command, Completed


def test_processes_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", i) for i in range(2)]
    monkeypatch.setattr("lockstep.distributed.devices.devices", lambda execution: gpus)
    assert process_count(Execution()) == 2
    assert process_count(Execution(nproc=3, backend="gloo")) == 3  # ranks may share a GPU there
    with pytest.raises(UserError, match="--nproc 3 needs 3 GPUs, this machine offers 2"):
        process_count(Execution(nproc=3))


def report(world: World, a: int, b: int) -> dict[str, Any]:
    return {
        "rank": world.rank,
        "size": world.size,
        "sum": a + b,
        "total": int(world.sum(torch.tensor(world.rank + 1))),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def test_one_process_runs_here() -> None:
    (value,) = launch(report, 1, 2, nproc=1, execution=Execution(device="cpu", threads=1))
    assert value == {"rank": 0, "size": 1, "sum": 3, "total": 1, "threads": 1, "pid": os.getpid()}


def test_a_value_from_each_rank_and_nothing_left_behind() -> None:
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    environment, handlers = dict(os.environ), list(map(signal.getsignal, stops))
    values = launch(report, 1, 2, nproc=2, execution=Execution(device="cpu"))
    assert [value["rank"] for value in values] == [0, 1]
    assert {(value["size"], value["sum"], value["total"]) for value in values} == {(2, 3, 3)}
    assert {value["threads"] for value in values} == {max(1, cores() // 2)}
    assert len({os.getpid(), *(value["pid"] for value in values)}) == 3
    assert dict(os.environ) == environment
    assert list(map(signal.getsignal, stops)) == handlers


SCRIPT = """
import json, os, signal, sys, threading, time
import lockstep, torch
from lockstep.config import Execution
from lockstep.config.execution import processes_on
from lockstep.distributed import signals

def report(world):
    torch.set_num_threads(2), torch.ones(1 << 20).add_(1)  # of threads that an import began a fork has none
    return world.rank, world.size, int(world.sum(torch.tensor(1)))

def unlucky(world):
    if world.rank == 1:
        raise ValueError("bad luck")
    world.barrier()

def leaves(world):
    sys.exit(0)

def stopped_at_its_end(world):
    ended, exit_now = threading.Event(), signals.exit_now

    def stop():  # by a thread that takes the signal, as torch's do: its handler runs in the main one
        ended.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    def end(code):
        ended.set()
        thread.join()
        exit_now(code)

    (thread := threading.Thread(target=stop, daemon=True)).start()
    signals.exit_now = end
    raise lockstep.UserError("no", "Do.")

def main():
    told = {}
    try:
        lockstep.launch(stopped_at_its_end, nproc=2, execution=Execution(device="cpu"))
    except lockstep.WorkerFailed as failed:
        told["refused"] = failed.message.splitlines()[0]
    told["values"] = lockstep.launch(report, execution=Execution(device="cpu", nproc=2, master_port=int(sys.argv[1])))
    try:
        lockstep.launch(unlucky, nproc=2, execution=Execution(device="cpu"))
    except lockstep.WorkerFailed as failed:
        told["failed"] = [failed.rank, failed.message, failed.exit_code, failed.trace.count("Traceback")]
    told["left"] = lockstep.launch(leaves, nproc=2, execution=Execution(device="cpu"))
    print(json.dumps(told))

GUARD
    main()
"""


def run_script(folder: Path, text: str, *args: str, how: tuple[str, ...] = ()) -> Completed:
    script = folder / "script.py"
    script.write_text(text)
    return Command(sys.executable, *how, str(script), *args, cwd=folder, warm=True).end(120)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def test_a_user_s_script(tmp_path: Path) -> None:
    ended = run_script(tmp_path, SCRIPT.replace("GUARD", "if True:"), str(free_port()))  # forked: it needs no guard
    told = {
        "refused": "no",
        "values": [[0, 2, 2], [1, 2, 2]],
        "failed": [1, "ValueError: bad luck", 1, 1],
        "left": [None, None],
    }
    assert (ended.code, ended.err, ended.orphans) == (0, "", ()), ended.text
    assert json.loads(ended.out) == told


WRONG = """
import sys
import torch
import lockstep as ls

def main(world):
    train, _ = ls.loaders("digits", world, batch_size=64, **({"sampler": [1]} if sys.argv[1] == "sampler" else {}))
    model = ls.parallelize(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), world)
    step = ls.TrainStep(model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(train.epoch(0))
    step((batch.images, batch.labels)) if sys.argv[1] == "tuple" else step(batch.images, batch.labels)

if __name__ == "__main__":
    ls.launch(main, nproc=int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("mistake", "says", "nproc"),
    [
        ("sampler", "ls.loaders takes no sampler\n  The order is a function of seed and epoch", "1"),
        ("tuple", "step takes one Batch, not tuple\n  ls.loaders gives Batches", "2"),
        ("two", "step takes one Batch, not Tensor, Tensor\n", "1"),
    ],
)
def test_a_mistake_in_a_script_is_a_sentence_and_the_line_of_the_script(
    mistake: str, says: str, nproc: str, tmp_path: Path
) -> None:
    ended = run_script(tmp_path, WRONG, mistake, nproc)
    assert (ended.code, ended.orphans) == (1, ()), ended.text
    rank = r"rank \d: " if nproc == "2" else ""
    assert re.match(f"lockstep: {rank}{re.escape(says)}", ended.err), ended.text
    assert "Traceback" not in ended.err
    *_, called = ended.err.strip().splitlines()
    assert re.fullmatch(r"  called at \S+script.py:\d+: .*(ls.loaders|step)\(.*", called), ended.text


THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


@pytest.mark.slow
def test_a_script_with_threads_has_its_workers_from_a_fresh_interpreter(tmp_path: Path) -> None:
    text = THREADED + SCRIPT.replace("GUARD", 'X = torch.ones(1 << 20) + 1\nif __name__ == "__main__":')
    ended = run_script(tmp_path, text, str(free_port()))
    assert (ended.code, ended.err, ended.orphans) == (0, "", ()), ended.text
    assert json.loads(ended.out)["values"] == [[0, 2, 2], [1, 2, 2]]


@pytest.mark.slow
def test_a_script_with_threads_and_without_the_guard_is_told_so(tmp_path: Path) -> None:
    ended = run_script(tmp_path, THREADED + SCRIPT.replace("GUARD", "if True:"), str(free_port()))
    assert ended.code == 1, ended.text
    assert 'Put the call under `if __name__ == "__main__":`' in ended.err
    assert "Traceback" not in ended.err, ended.text
    assert not ended.orphans


DEAF = """
import signal, time
import lockstep
from lockstep.distributed import launcher
launcher.SHUTDOWN_S = 0.5

def main(world):
    if world.rank == 1:
        raise ValueError("bad luck")
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as in C code that never comes back
    time.sleep(600)

if __name__ == "__main__":
    try:
        lockstep.launch(main, nproc=2)
    except lockstep.WorkerFailed as failed:
        print(failed)
"""


def test_a_failure_is_told_though_another_rank_hears_nothing(tmp_path: Path) -> None:
    ended = run_script(tmp_path, DEAF)
    assert (ended.code, ended.out, ended.orphans) == (0, "rank 1: ValueError: bad luck\n", ()), ended.text


STOPPED = """
import os, signal, sys
import lockstep
from lockstep.config import Recovery
from lockstep.distributed import launcher

MOMENT, RESTARTS, HANG_TIMEOUT, launcher.SHUTDOWN_S = sys.argv[1], *map(float, sys.argv[2:])

def stop_once(rank):
    if rank == 1 and not os.path.exists("once"):
        open("once", "x").close()
        os.kill(os.getpid(), signal.SIGSTOP)

def main(world):
    world.barrier()
    if MOMENT == "end":
        stop_once(world.rank)
    return world.rank

if __name__ == "__main__":
    if MOMENT == "start":
        import lockstep.distributed.world as world
        ranks = world.launcher_ranks
        def stopping(environ):
            found = ranks(environ)
            stop_once(found[0])
            return found
        world.launcher_ranks = stopping
    recovery = Recovery(max_restarts=int(RESTARTS), hang_timeout=HANG_TIMEOUT)
    print(lockstep.launch(main, nproc=3, recovery=recovery))
"""


@pytest.mark.parametrize("moment", [pytest.param("start", marks=pytest.mark.slow), "end"])
def test_a_rank_that_is_stopped_where_no_other_one_watches_it(tmp_path: Path, moment: str) -> None:
    ended = run_script(tmp_path, STOPPED, moment, "1", "0.5", "2")
    assert (ended.code, ended.out, ended.orphans) == (0, "[0, 1, 2]\n", ()), ended.text
    told, again = ended.err.splitlines()
    assert re.sub(r"pid \d+", "pid 7", told) == (
        "lockstep: rank 1 (pid 7) is stopped by a signal (SIGSTOP, Ctrl-Z); killed after 2.5 s (--hang-timeout)"
    )
    assert again.startswith("lockstep: rank 1: no progress for --hang-timeout"), again
    assert again.endswith("; restart 1 of 1 on 3 process(es)"), again


@pytest.mark.parametrize("hang_timeout", [pytest.param("0", marks=pytest.mark.slow), "0.1"])
def test_a_rank_that_is_stopped_for_a_moment_is_waited_for(tmp_path: Path, hang_timeout: str) -> None:
    (tmp_path / "script.py").write_text(STOPPED)
    command = Command(sys.executable, "script.py", "end", "0", hang_timeout, "5", cwd=tmp_path, warm=True)
    # the others end meanwhile, each between two looks at it
    command.until(lambda: [stopped(pid) for pid in command.workers()] == [True], 60)
    time.sleep(2)
    (waiting,) = command.workers()
    os.kill(waiting, signal.SIGCONT)
    ended = command.end(60)
    assert (ended.code, ended.out, ended.err, ended.orphans) == (0, "[0, 1, 2]\n", "", ()), ended.text


@pytest.mark.slow
def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    """As by Ctrl-Z, which the process that starts the ranks is deaf to."""
    (tmp_path / "script.py").write_text(STOPPED)
    command = Command(sys.executable, "script.py", "end", "0", "0.5", "2", cwd=tmp_path, warm=True)
    command.until(lambda: [stopped(pid) for pid in command.workers()] == [True], 60)
    os.kill(command.pid, signal.SIGSTOP)
    (waiting,) = command.workers()
    time.sleep(5)
    assert command.workers() == [waiting]
    for pid in (waiting, command.pid):
        os.kill(pid, signal.SIGCONT)
    ended = command.end(60)
    assert (ended.code, ended.out, ended.err, ended.orphans) == (0, "[0, 1, 2]\n", "", ()), ended.text


ASLEEP = """
import os, signal, sys, time
import lockstep
from lockstep.config import Recovery

def main(world, launcher):
    if sys.argv[1] == "kill":
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGKILL))
    world.barrier()
    if world.rank == 1:
        if sys.argv[1] != "kill":
            os.kill(os.getppid(), signal.SIGSTOP)  # the process that starts the ranks
        if sys.argv[1] != "end":
            os.kill(launcher, signal.SIGTERM)
    if sys.argv[1] != "end":
        time.sleep(100)
    return world.rank

if __name__ == "__main__":
    print(lockstep.launch(main, os.getpid(), nproc=2, recovery=Recovery(max_restarts=1)))
"""
TOLD = """lockstep: the process that starts ranks and loader workers (pid 7) is stopped by a signal (SIGSTOP, Ctrl-Z); \
it is told to go on
"""


@pytest.mark.parametrize(
    ("asked", "code", "out", "err"), [("end", 0, "[0, 1]\n", TOLD), ("stop", 143, "", TOLD), ("kill", 143, "", "")]
)
def test_a_run_ends_as_asked_where_the_process_that_starts_the_ranks_is_stopped_or_killed(
    tmp_path: Path, asked: str, code: int, out: str, err: str
) -> None:
    ended = run_script(tmp_path, ASLEEP, asked)
    assert (ended.code, ended.out, ended.orphans) == (code, out, ()), ended.text
    assert re.sub(r"pid \d+", "pid 7", ended.err) == err


MEETING = """
import os, signal, sys
import lockstep
from lockstep.config import Recovery
from lockstep.distributed.world import World

class Struck(World):
    def largest(self, values):  # what the ranks do together first, when all are connected
        if self.rank == 1 and not os.path.exists("once"):
            open("once", "x").close()
            os.kill(os.getpid(), int(sys.argv[1]))
        return super().largest(values)

def main(world):
    return world.rank

if __name__ == "__main__":
    import lockstep.distributed.world
    lockstep.distributed.world.World = Struck
    print(lockstep.launch(main, nproc=3, recovery=Recovery(max_restarts=1)))
"""


def test_a_rank_that_is_lost_while_they_meet_is_started_again(tmp_path: Path) -> None:
    ended = run_script(tmp_path, MEETING, str(int(signal.SIGTERM)))
    assert (ended.code, ended.out, ended.orphans) == (0, "[0, 1, 2]\n", ()), ended.text
    # beside it may stand Python's word of a file that another rank was reading for its traceback as it was ended
    (told,) = [line for line in ended.err.splitlines() if line.startswith("lockstep: ")]
    assert told.startswith("lockstep: rank 1: ended by SIGTERM"), ended.text
    assert told.endswith("; restart 1 of 1 on 3 process(es)"), ended.text


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
JOINING = """
import lockstep
def main(world, a):
    return world.rank, world.size, a
if __name__ == "__main__":
    print(lockstep.launch(main, 3, nproc=7))
"""


@pytest.mark.slow
def test_under_torchrun_the_same_call_joins(tmp_path: Path) -> None:
    ended = run_script(tmp_path, JOINING, how=TORCHRUN)
    assert ended.code == 0, ended.text
    assert sorted(re.findall(r"\[\(.*?\)\]", ended.out)) == ["[(0, 2, 3)]", "[(1, 2, 3)]"]


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    argv = (*TORCHRUN, "-m", "lockstep", "train", "--epochs", "1", "--out", "run")
    ended = Command(sys.executable, *argv, cwd=tmp_path, warm=True).end(120)
    assert (ended.code, ended.orphans) == (0, ()), ended.text
    assert ended.out.count("test accuracy") == ended.out.count("run folder") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run/journal.jsonl").read_text().count('"processes": 2') == 1


@pytest.mark.integration
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model resnet19", "unknown model 'resnet19'"),
        ("--epochs x", "--epochs x is not a whole number"),
        ("--lr 1e30 --optimizer sgd", "the loss became non-finite at step"),
        ("mnist --data-dir none", "train-images-idx3-ubyte"),
    ],
)
def test_an_error_under_torchrun_is_told_once(tmp_path: Path, flags: str, message: str) -> None:
    ended = Command(sys.executable, *TORCHRUN, "-m", "lockstep", "train", *flags.split(), cwd=tmp_path).end(120)
    assert ended.code != 0
    ours = re.findall(r"^lockstep: .*", ended.err, re.MULTILINE)
    assert len(ours) == 1, ended.text
    assert message in ours[0]
    assert not ended.orphans


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    """Two launchers on this machine, one with two processes and one with one."""
    port, folders = free_port(), [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    commands = [
        Command(
            *(sys.executable, "-m", "lockstep", "train", "--epochs", "1", "--batch-size", "99", "--threads", "1"),
            *("--nnodes", "2", "--node-rank", str(rank), "--nproc", str(2 - rank)),
            *("--ip", "localhost", "--port", str(port), "--out", "run"),
            cwd=folders[rank],
            warm=True,
        )
        for rank in (1, 0)
    ]
    for ended, rank in zip([command.end(120) for command in commands], (1, 0), strict=True):
        assert (ended.code, ended.err, ended.orphans) == (0, "", ()), ended.text
        assert ended.out.count("test accuracy") == (rank == 0)
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [["run"], []]
    assert '"processes": 3' in (folders[0] / "run/journal.jsonl").read_text()


@pytest.mark.integration
def test_a_machine_that_stays_alone_says_so(tmp_path: Path) -> None:
    argv = ("--nnodes", "2", "--node-rank", "0", "--nproc", "1", "--ip", "localhost", "--port", str(free_port()))
    limits = ("--collective-timeout", "3", "--hang-timeout", "2")
    ended = Command(sys.executable, "-m", "lockstep", "train", *argv, *limits, cwd=tmp_path).end(120)
    assert ended.code == 2, ended.text
    assert "machine 0 of 2 did not meet the others at localhost:" in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()


def lose(world: World) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_restart_that_can_not_be_noted_leaves_no_process() -> None:
    """As in a run folder that can't be read: the warm process would wait for its owner, and that at its end for it."""
    noting = Mock(side_effect=UserError("the folder can't be read"))
    with pytest.raises(UserError, match="can't be read"):
        launch(lose, nproc=2, execution=Execution(device="cpu"), recovery=Recovery(max_restarts=1), restarting=noting)
    assert not multiprocessing.active_children()
