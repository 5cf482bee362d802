"""What the kernel knows of processes and limits: through psutil, and from /proc and /sys what psutil does not read."""

import os
import platform
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from lockstep.errors import UserError

_MOST_THREADS_A_CORE = 16
_OPEN_FILES, _OPEN_FILES_A_PEER = 48, 8  # 2 processes of digits take between 24 and 32, loader workers a few each
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
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def require_threads(asked: int) -> None:
    """Refuse --threads that only wait for each other: 257 on 2 cores took over a minute for 3 steps."""
    if asked > _MOST_THREADS_A_CORE * cores():
        raise UserError(
            f"--threads {asked} are too many for {cores()} core(s)",
            f"Use {_MOST_THREADS_A_CORE * cores()} at most; 0 shares the cores out.",
        )


def threads_each(asked: int, local_size: int) -> int:
    """CPU threads of each of so many processes on this host: --threads, or an equal part of the cores.

    Raises:
        UserError: for too many (`require_threads`).
    """
    require_threads(asked)
    return asked or max(1, cores() // local_size)


def require_descriptors(processes: int) -> None:
    """Have the system allow what so many processes that talk to each other open; raises UserError where it does not."""
    wanted = _OPEN_FILES + _OPEN_FILES_A_PEER * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise UserError(
                f"{hard} open files are allowed here, and each of {processes} processes may need {wanted}",
                f"Allow more (`ulimit -n {max(wanted, 1024)}`), or use --nproc 1.",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def machine() -> str:
    """What two processes share that see each other's pids: the host and its pid namespace."""
    try:
        return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"
    except (OSError, AttributeError):
        return f"{os.getpid()} alone"  # nothing can be seen of others here


def born(pid: int) -> int:
    """When a process started, in seconds since the machine did; tells apart a later one of its pid. 0: unknown."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return round(process.create_time() - psutil.boot_time())  # both move with the clock, the difference does not
    return 0


def _status(pid: int, since: int) -> str:
    """psutil's word for what a process is doing; empty where it is gone, or not the one that was born then."""
    with suppress(psutil.Error):
        if not since or abs(born(pid) - since) <= 1:  # either may be rounded
            return psutil.Process(pid).status()
    return ""


def alive(pid: int, since: int = 0) -> bool:
    """True for a process that runs; a zombie is only an entry that its parent has not read. `since`: its `born`."""
    return _status(pid, since) not in ("", *_DEAD)


def state(pid: int, since: int = 0) -> str:
    """What a process of this machine is doing, in words. `since`: its `born`, where known."""
    status = _status(pid, since)
    text = _STATES.get(status, status)
    if status in (psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP):
        channel = _text(Path(f"/proc/{pid}/wchan")).strip()
        text += f" in {channel}" if channel not in ("", "0") else ""
    return text or GONE


def stopped(pid: int, since: int = 0) -> bool:
    """True for a process that a signal has stopped, not a debugger. `since`: its `born`, where known."""
    return _status(pid, since) == psutil.STATUS_STOPPED


def wake(pid: int, since: int) -> None:
    """Let a process of this machine go on that a signal stopped. `since`: its `born`."""
    if stopped(pid, since):
        with suppress(OSError):  # it ended meanwhile
            os.kill(pid, signal.SIGCONT)


def descriptor(pid: int | str, name: str) -> Path | None:
    """A process's open file whose name contains this, where it can be read; None where there is none."""
    with suppress(OSError):  # gone, or another user's
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if name in str(entry.readlink()):
                    return entry
    return None


def catches(pid: int, number: signal.Signals) -> bool:
    """True where a process has a handler for a signal."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", _text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


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
    """Cores' worth of time that control groups grant this process; None: no limit."""
    found = []
    for folder in _control_groups("cpu", root, membership):
        version_1 = f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
        limit = (_text(folder / "cpu.max") or version_1).split()
        if len(limit) == 2 and limit[0].isdigit():  # "max" and -1 are no limit
            found.append(int(limit[0]) / int(limit[1]))
    return min(found, default=None)


def memory_left(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that control groups still grant this process, the page cache not counted as used; None: no limit."""
    left = []
    for folder in _control_groups("memory", root, membership):
        names = ("memory.max", "memory.current", "inactive_file")
        if not (folder / names[0]).exists():
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = (_text(folder / name).strip() for name in names[:2])
        if limit.isdigit() and used and int(limit) < 1 << 60:  # version 1 writes no limit as 2^63
            cache = re.search(rf"^{names[2]} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            left.append(int(limit) - int(used) + (int(cache[1]) if cache else 0))
    return min(left, default=None)


def _control_groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The control group folders that rule this process, of both versions, leaf first."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        bases = [root / controllers, root / controller] if controllers else [root / "unified", root]
        base = next((base for base in bases if base.is_dir()), None)
        if base is not None:
            inner = base / path.strip("/")
            yield inner
            yield from (folder for folder in inner.parents if folder.is_relative_to(base))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the kernel has no such file here
        return ""
