"""Starts the user's processes: imports torch once, and forks each of them. Requests and answers are lines of JSON.

A request has `plan` (its file, without a port), `ranks` (an environment for each process) and `out` (a folder for what
they print). The answer has `codes` (exit codes by number, negative: a signal), `port`, and `ended` ("done", "failed",
"deadline", "stalled").
"""

import ctypes
import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lockstep.commands.audit import waiting
from lockstep.commands.audit.plan import VARIABLE, Plan, read

_POLL_S = 0.02
_WORKING = 0.03  # of a core, on which processes that only wait for each other stay far below
_GRACE_S = 5.0  # that the others live on when one has failed: their own errors come meanwhile
_SUBREAPER = 36  # of prctl(2): orphans below become this process's children, and so can be ended


def main() -> None:
    """Serve requests until standard input ends."""
    from lockstep.commands.audit.inside import end_with

    end_with(int(sys.argv[1]))
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    for name in ("torch", "torch.distributed", "torch.utils.data", "torch._dynamo", *sys.argv[2:]):
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_served(json.loads(line))), flush=True)
    os._exit(0)  # libraries that torch has loaded have words to say at an ordinary end


def _served(request: dict[str, Any]) -> dict[str, Any]:
    path, out = Path(request["plan"]), Path(request["out"])
    plan = read(path)
    store, port = _store()
    dataclasses.replace(plan, port=port, started=time.time()).write(path)
    started = {}
    for number, environ in enumerate(request["ranks"]):
        pid = os.fork()
        if not pid:
            _become(environ | {"MASTER_PORT": str(port), VARIABLE: str(path)}, out / f"{number}.txt")
        started[pid] = number
    codes, ended = _waited(dict(started), store, plan)
    _sweep()
    return {"codes": [codes[number] for number in range(len(started))], "port": port, "ended": ended}


def _store() -> tuple[int, int]:
    """A process that keeps the ranks' store on a free port of the loopback: (its pid, the port)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        from torch.distributed import TCPStore

        from lockstep.commands.audit.inside import end_with

        end_with(os.getppid())
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        os.close(writer)
        while True:
            time.sleep(3600)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return pid, int(pipe.read())


def _become(environ: dict[str, str], out: Path) -> None:
    """Be one of the user's processes, from its first line to its end."""
    from lockstep.commands.audit import inside

    code = 1
    try:
        parent = os.getppid()
        os.setsid()
        inside.end_with(parent)
        os.environ.update(environ)
        sink = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((0, nothing), (1, sink), (2, sink)):
            os.dup2(target, number)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        inside.run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _waited(running: dict[int, int], store: int, plan: Plan) -> tuple[dict[int, int], str]:
    """Wait for all to end, and end them where one failed, the time is up or nothing happens any more."""
    begin = changed = time.monotonic()
    codes, ended, size, worked = dict[int, int](), "done", -1, 0.0
    failed_at = 0.0
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if os.waitstatus_to_exitcode(status) and not failed_at:
                failed_at, ended = time.monotonic(), "failed"
            continue
        now = time.monotonic()
        if (grown := sum(each.stat().st_size for each in Path(plan.events).glob("*.jsonl"))) != size:
            size, changed, worked = grown, now, _work()
        if now - changed > plan.stall_s and _work() - worked > _WORKING * (now - changed):
            changed, worked = now, _work()  # no events, but no waiting either
        if failed_at and now - failed_at > _GRACE_S:
            break
        if now - begin > plan.deadline_s or now - changed > plan.stall_s:
            ended = "deadline" if now - begin > plan.deadline_s else "stalled"
            break
        time.sleep(_POLL_S)
    if running:
        waiting.ask(Path(plan.events), {each.pid for each in psutil.Process().children(recursive=True)})
    for pid in running:
        os.kill(pid, signal.SIGKILL)  # all of them before one can see that another is gone
    for pid, number in running.items():
        os.waitpid(pid, 0)
        codes[number] = -signal.SIGKILL
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return codes, ended


def _work() -> float:
    """Seconds of CPU time of all processes below this one, those that have ended among them."""
    own = os.times()
    total = own.children_user + own.children_system
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended meanwhile
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _sweep() -> None:
    """End what the user's processes have left behind: all of it are this process's children now."""
    left = psutil.Process().children(recursive=True)
    for each in left:
        each.kill()
    psutil.wait_procs(left, timeout=10)


if __name__ == "__main__":
    main()
