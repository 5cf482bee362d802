"""Python processes that begin with torch imported: forked from a server of imported modules, not executed.

`Server.start` begins what `python ARGS` would, but spares it the import of torch, four seconds of a core. The new
process is a child of the one that asks, has its own descriptors, folder, environment and signals, and starts others in
the same way: what multiprocessing spawns, its fork servers, and lockstep's own commands. So what runs is what a user
runs, but for imports.
Tests about those, or about the start itself, execute the interpreter: see tests/subprocesses.py.

A forked process becomes a child of the one that asked because the process between them ends at once: the kernel gives
it to the nearest ancestor that is a subreaper (prctl(2)), which the one that asks makes of itself meanwhile.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

_MODULES = (
    "torch._dynamo",  # which the first optimizer of a process imports
    "torchvision",
    "rich.progress",
    "lockstep.cli",
    "lockstep.distributed.launcher",
    "lockstep.training.run_folder",
    "lockstep.training.loop",
)
_LOADED_WITH = ("PYTHON", "MKL_", "KMP_", "OMP_", "OPENBLAS_", "LD_")  # variables read once, at the start
_TAKEN_OVER = {"PYTHONPATH", "PYTHONWARNINGS", "OMP_NUM_THREADS"}  # but these
_SUBREAPER, _DIE_WITH_PARENT = 36, 1  # of prctl(2)
_MESSAGE = 1 << 17
_PARKING = 512  # where descriptors wait until their places are free
_execute = util.spawnv_passfds
_fork_and_execute = subprocess._fork_exec  # type: ignore[attr-defined]
_ASKING = threading.Lock()  # a process is a subreaper for one request, of whichever server


class Server:
    """A child of this process that has imported everything, as the process that asks sees it."""

    def __init__(self, channel: socket.socket, environ: Mapping[str, str]) -> None:
        self.channel, self.owner, self.lock, self.ready = channel, os.getpid(), threading.Lock(), False
        self.loaded_with = _loaded_with(environ)

    def serves(self, args: Sequence[str], env: Mapping[str, str]) -> bool:
        """True where `python ARGS` in this environment would be the same process but for its imports."""
        known = args[0] in ("-c", "-m") or args[0][0] != "-"
        return known and env.get("PYTHONWARNINGS", "") in ("", "error") and _loaded_with(env) == self.loaded_with

    def start(
        self, args: Sequence[str], fds: Mapping[int, int], env: Mapping[str, str], cwd: str, session: bool = False
    ) -> int:
        """Start `python ARGS`; `fds` maps its descriptors to this process's. Returns its pid."""
        request = {
            "args": list(args),
            "fds": list(fds),
            "env": dict(env),
            "cwd": cwd,
            "session": session,
            "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        with self.lock:
            self.ready = self.ready or bool(self.channel.recv(_MESSAGE))  # it has imported
            with _ASKING:
                _set_subreaper(True)
                socket.send_fds(self.channel, [json.dumps(request).encode()], list(fds.values()))
                answer = self.channel.recv(_MESSAGE)  # it has its new parent
                _set_subreaper(False)  # other orphans, as of Slurm's daemons, are not ours to wait for
        if not answer:
            raise RuntimeError("the server of warm processes has died")
        return int(answer)


def _set_subreaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


_server: Server | None = None


def server() -> Server:
    """This process's server. The first call executes it and returns; it imports while the caller goes on."""
    global _server
    if _server is None or _server.owner != os.getpid():
        _server = executed(os.environ)
        _adopt_multiprocessing()
    return _server


def executed(environ: Mapping[str, str]) -> Server:
    """Another server: an interpreter of its own, in which texts may hash otherwise, and objects lie elsewhere."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, "-c", f"from tests import warm; warm.main({its.fileno()})"],
        cwd=Path(__file__).parents[1],
        env={**environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not be forked
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
    ).returncode = 0  # it ends with us, and nobody waits for it
    its.close()
    atexit.register(ours.close)
    return Server(ours, environ)


def main(channel: int) -> None:
    """What the executed server runs."""
    for name in _MODULES:
        importlib.import_module(name)
    assert len([*Path("/proc/self/task").iterdir()]) == 1, (
        "a thread that an import started would be missing after a fork"
    )
    del os.environ["OPENBLAS_NUM_THREADS"]
    gc.collect()
    gc.freeze()  # else the first collection of every process would copy all that is imported
    _serve(socket.socket(fileno=channel))


def _serve(channel: socket.socket) -> NoReturn:
    """Fork a process for each request, until nobody can ask any more."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # what a group is sent is not for us
    _name("warm server")
    with suppress(BrokenPipeError):  # nobody asks any more
        channel.send(b"ready")
    while True:
        try:
            message, fds, *_ = socket.recv_fds(channel, _MESSAGE, 64)
        except ConnectionResetError:  # who was to ask has ended before we were ready
            message = b""
        if not message:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                os.write(write, str(pid).encode())
                os._exit(0)
            for fd in (channel.detach(), read, write):
                os.close(fd)
            _become(json.loads(message), fds)
        os.waitpid(between, 0)  # from here on the process has its new parent
        channel.send(os.read(read, 64))
        for fd in (read, write, *fds):
            os.close(fd)


def _become(request: dict[str, Any], received: list[int]) -> NoReturn:
    """Turn this fork into the process that was asked for."""
    if request["session"]:
        os.setsid()
    args = request["args"]
    program = " ".join(args[:2])
    _name("warm spawn_main" if "spawn_main" in program else "warm python")
    if "multiprocessing.forkserver" in program:
        forkserver.ensure_running = _ensure_running
        forkserver._forkserver.ensure_running = _ensure_running  # type: ignore[method-assign]
    else:
        _fork_a_server(received, request["env"])
    parked = [fcntl.fcntl(fd, fcntl.F_DUPFD, _PARKING) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, place in zip(parked, request["fds"], strict=True):
        os.dup2(fd, place)
        os.close(fd)
    os.chdir(request["cwd"])
    # where a fresh interpreter of multiprocessing's looks for the main script
    process.ORIGINAL_DIR = request["cwd"]  # type: ignore[attr-defined]
    _take_over(request["env"])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = number in request["ignored"] or number in (signal.SIGPIPE, signal.SIGXFSZ)
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _run(args)


def _fork_a_server(fds: list[int], environ: Mapping[str, str]) -> None:
    """A server for what this process will start, forked while nothing has happened in it yet."""
    global _server
    parent = os.getpid()
    low, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with low:  # out of the way of the descriptors that this process is to have
        ours = socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, _PARKING))
    pid = os.fork()
    if pid == 0:
        for fd in (ours.detach(), *fds):
            os.close(fd)
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)
        _serve(its)
    its.close()
    _server = Server(ours, environ)
    _adopt_multiprocessing()
    subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]

    def stop() -> None:  # what is not waited for here would stay a zombie of the test suite
        if os.getpid() == parent:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    atexit.register(stop)


def _take_over(environ: Mapping[str, str]) -> None:
    """What Python and libraries have read of their environment at their start, from another one."""
    inherited = [str(Path(entry)) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    wanted = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*wanted, *(entry for entry in sys.path[1:] if entry not in inherited)]
    os.environ.clear()
    os.environ.update(environ)
    if environ.get("PYTHONWARNINGS"):
        sys.warnoptions[:] = ["error"]
        warnings.simplefilter("error")
    if "OMP_NUM_THREADS" in environ:
        sys.modules["torch"].set_num_threads(int(environ["OMP_NUM_THREADS"]))
    sys.modules["numpy"].random.seed()  # from the system, as on import; a fork would begin where the server's stands


def _run(args: Sequence[str]) -> NoReturn:
    """The program, in a main module of its own; ends as the interpreter does."""
    what, rest = args[0], args[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.argv[:] = args if what[0] != "-" else [what, *rest[1:]]
    sys.path.insert(0, {"-m": str(Path.cwd()), "-c": ""}.get(what, str(Path(what).absolute().parent)))
    try:
        if what == "-m":
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif what == "-c":
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            main.__file__ = what
            exec(compile(Path(what).read_bytes(), what, "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace.tb_next if trace else None)  # without the frame of this file
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _end(code: int) -> NoReturn:
    """As the interpreter ends, but for freeing what was imported: it would first be copied, for 1.5 s of a core."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _loaded_with(environ: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k.startswith(_LOADED_WITH) and k not in _TAKEN_OVER}


def _name(name: str) -> None:
    """What ps shows beside the server's command line; at most 15 bytes."""
    Path("/proc/self/comm").write_text(name)


def _adopt_multiprocessing() -> None:
    util.spawnv_passfds = _spawnv_passfds  # type: ignore[assignment]


def _spawnv_passfds(path: bytes, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
    """How multiprocessing starts an interpreter: a warm one, but for the resource tracker, which imports little."""
    program = [os.fsdecode(arg) for arg in args[1 + len(util._args_from_interpreter_flags()) :]]  # type: ignore[attr-defined]
    forked = _server is None or _server.owner != os.getpid()  # a server's children would be another process's
    if forked or "resource_tracker" in program[-1] or not server().serves(program, os.environ):
        return _execute(path, args, passfds)
    return server().start(program, {fd: fd for fd in (0, 1, 2, *passfds)}, os.environ, str(Path.cwd()))


def _fork_exec(args: Sequence[bytes], files: Any, close: bool, keep: Any, cwd: Any, env: Any, *rest: Any) -> int:
    """How subprocess starts a program: a warm one where it is a command of lockstep's that a command starts."""
    program = [os.fsdecode(arg) for arg in args]
    environ = dict(os.environ) if env is None else dict(os.fsdecode(each).split("=", 1) for each in env)
    own = program[:3] == [sys.executable, "-m", "lockstep"]
    if not own or _server is None or _server.owner != os.getpid() or not _server.serves(program[1:], environ):
        return int(_fork_and_execute(args, files, close, keep, cwd, env, *rest))
    streams = {place: place if fd < 0 else fd for place, fd in enumerate((rest[0], rest[3], rest[5]))}
    return _server.start(program[1:], streams, environ, os.fsdecode(cwd or Path.cwd()), session=bool(rest[9]))


def _ensure_running() -> None:
    """A fork server's child asks the same server for its own children, as multiprocessing's documentation has it."""
    resource_tracker.ensure_running()
