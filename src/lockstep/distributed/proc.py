"""What the kernel knows of processes and limits: through psutil, and from /proc and /sys what psutil does not read."""

import math
import os
import platform
import re
import resource
import signal
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from lockstep.errors import UserError

_MOST_THREADS_A_CORE = 16
# 2 processes of digits take between 24 and 32 files; a worker's pipe and its copy, for a training and a validation set
_OPEN_FILES, _OPEN_FILES_A_PEER, _OPEN_FILES_A_WORKER = 48, 8, 4
_OWN_THREADS = 8  # of a rank beside its CPU threads: gloo's, the heartbeat's, a writer...
_ENDS_WITH_US = r"multiprocessing\.(resource_tracker|forkserver)"  # Python's own helpers, which end with their owner
_LEAVE_S = 2.0  # what processes get to end by themselves after the one that started them
GONE = "gone: no such process any more"
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_STATES = {
    psutil.STATUS_DISK_SLEEP: "waiting for a disk or a driver, uninterruptibly",
    psutil.STATUS_STOPPED: "stopped by a signal (SIGSTOP, Ctrl-Z)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    **dict.fromkeys(_DEAD, "dead"),
}


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_each(asked: int, local_size: int = 1) -> int:
    """CPU threads of each of so many processes on this host: --threads, or an equal part of the cores.

    Raises UserError for so many that they only wait for each other: 257 on 2 cores took over a minute for 3 steps.
    """
    if asked > (most := _MOST_THREADS_A_CORE * cores()):
        raise UserError(
            f"--threads {asked} are too many for {cores()} core(s)", f"Use {most} at most; 0: a fair share."
        )
    return asked or max(1, cores() // local_size)


def require_room(processes: int, threads: int, workers: int) -> None:
    """Have the system allow the files, threads and processes of so many ranks, each with so many loader workers.

    Threads are tried: what limits them may be the user's limit, the container's or memory. Raises UserError where the
    system does not allow it: a library would abort later.
    """
    what, fewer = f"{processes} process(es) with {workers} loader worker(s) each", "or use fewer: --nproc, --workers"
    wanted = _OPEN_FILES + _OPEN_FILES_A_PEER * processes + _OPEN_FILES_A_WORKER * workers
    soft, hard = (math.inf if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    if hard < wanted:
        remedy = f"Allow more (`ulimit -n {max(wanted, 1024)}`), {fewer}."
        raise UserError(f"{hard} open files are allowed here, and each of {what} may need {wanted}", remedy)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, -1 if hard == math.inf else int(hard)))
    needed = processes * (threads_each(threads, processes) + _OWN_THREADS + 4 * workers)
    go, started = threading.Event(), list[threading.Thread]()
    try:
        while len(started) < needed:
            thread = threading.Thread(target=go.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise UserError(
            f"this user may start {len(started)} more threads and processes here, and {what} need {needed}",
            f"Allow more (`ulimit -u`, `ulimit -v`, the container's pids limit), {fewer}, --threads.",
        ) from None
    finally:
        go.set()
        for thread in started:
            thread.join()


def children() -> set[int]:
    """The processes that this one has started, and those that it has adopted; none where there is no /proc."""
    with suppress(OSError):
        return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}
    return set()


def end_leftovers(who: str, known: Collection[int] = ()) -> None:
    """Kill and name the children of this process that are still there, but for `known` and those of other sessions.

    What has made a session of its own (setsid) was meant to stay. The others get a moment to end by themselves.
    """
    with suppress(OSError, psutil.Error):  # it ended meanwhile
        found = [psutil.Process(pid) for pid in children() - {*known} if os.getsid(pid) == os.getsid(0)]
        others = [each for each in found if not re.search(_ENDS_WITH_US, f"{each.cmdline()}")]
        for child in psutil.wait_procs(others, _LEAVE_S)[1]:
            what = f"{who} left a process behind: {child.name()} (pid {child.pid}), which is ended now"
            print(f"lockstep: {what}\n", end="", file=sys.stderr, flush=True)
            for each in [*child.children(recursive=True), child]:
                each.kill()
            child.wait(_LEAVE_S)


def machine() -> str:
    """What two processes share that see each other's pids: the host and its pid namespace."""
    try:
        return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{os.getpid()} alone"  # nothing can be seen of others here


def born(pid: int) -> int:
    """When a process started, in seconds since the machine did; tells apart a later one of its pid. 0: unknown."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return round(process.create_time() - psutil.boot_time())  # both move with the clock, the difference does not
    return 0


def _status(pid: int, since: int) -> str:
    """psutil's word for what a process is doing; empty where it is gone, or not the one that was born then."""
    with suppress(psutil.Error, ValueError):  # ValueError: no number of a process
        if not since or abs(born(pid) - since) <= 1:  # either may be rounded
            return psutil.Process(pid).status()
    return ""


def alive(pid: int, since: int = 0) -> bool:
    """True for a process that runs; a zombie is only an entry that its parent has not read. `since`: its `born`."""
    return _status(pid, since) not in ("", *_DEAD)


def state(pid: int, since: int = 0) -> str:
    """What a process of this machine is doing, in words. `since`: its `born`, where known."""
    status = _status(pid, since)
    channel = _text(Path(f"/proc/{pid}/wchan")).strip() if "sleep" in status else ""
    return (_STATES.get(status, status) + (f" in {channel}" if channel not in ("", "0") else "")) or GONE


def stopped(pid: int, since: int = 0) -> bool:
    """True for a process that a signal has stopped, not a debugger. `since`: its `born`, where known."""
    return _status(pid, since) == psutil.STATUS_STOPPED


def wake(pid: int, since: int) -> None:
    """Let a process go on that a signal stopped. `since`: its `born`."""
    with suppress(OSError):  # it ended meanwhile
        if stopped(pid, since):
            os.kill(pid, signal.SIGCONT)


def listener_at(port: int) -> str:
    """The process that listens at a TCP port, as `python (pid 7)`; empty where that is not for us to see."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"{psutil.Process(each.pid).name()} (pid {each.pid})"
    return ""


def cpu_model() -> str:
    """The processor's name."""
    named = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The NVIDIA driver's version, as 550.54.15; empty without one."""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _text(path))
    return found[1] if found else ""


def cpu_quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Cores' worth of time that control groups (version 2) grant this process; None: no limit."""
    found = re.search(r"^0::/(.*)$", _text(membership), re.MULTILINE)
    leaf = root / (found[1] if found else "")
    folders = [folder for folder in (leaf, *leaf.parents) if folder.is_relative_to(root)]
    limits = [re.match(r"(\d+) (\d+)", _text(folder / "cpu.max")) for folder in folders]
    return min((int(limit[1]) / int(limit[2]) for limit in limits if limit), default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the kernel has no such file here
        return ""
