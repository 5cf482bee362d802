"""The host's cores, memory, shared memory and open files, against what a run would take."""

import hashlib
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.commands.doctor.finding import Finding, graded
from lockstep.commands.doctor.plan import Plan

_MIB, _GIB = 2**20, 2**30
_SPIN_S, _BLOCK = 0.4, bytes(_MIB)
_LEAST_SHARE = 0.7  # of the cores' time
_CROWD = 3  # threads and loader workers for each core; the defaults come to so many
_LEAST_FILES, _USUAL_FILES = 256, 1024
_LEAST_SHM, _USUAL_SHM = 64 * _MIB, 512 * _MIB  # the first is what Docker gives
_LEAST_RANK, _USUAL_RANK = 0.4 * _GIB, 1.0 * _GIB  # the first is what torch and its libraries take alone


_MORE_SHM = (
    "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm; or --workers 0."
)


def cores_got(threads: int) -> float:
    """Cores' worth of time that so many threads get when all of them compute."""

    def spin(until: float) -> None:
        while time.perf_counter() < until:
            hashlib.sha256(_BLOCK)  # lets go of the interpreter's lock

    began, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(spin, [began + _SPIN_S] * threads))
    return (time.process_time() - used) / (time.perf_counter() - began)


def cores(
    plan: Plan, processes: int, usable: int, quota: float | None, got: float, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Cores against processes, threads and loader workers.

    `quota`: cores' worth of time that a control group grants, None: no limit; `got`: what `usable` busy threads got.
    """
    each, workers = plan.threads or max(1, usable // processes), plan.workers
    wanted, limit = processes * each, min(usable, quota or usable)
    numbers = {"cores": usable, "quota_cores": quota, "got_cores": round(got, 2), "threads": wanted}
    wish = f"{processes} process(es) x {each} thread(s)"
    if wanted > limit:
        limited = limit < usable
        why = f"a control group grants {limit:g} of {usable} cores" if limited else f"{usable} core(s)"
        fewer = f" --nproc {int(limit) or 1}" if processes > limit else ""
        more = ", or a larger CPU limit for the container or job" if limited else ""
        remedy = f"Use --threads {max(1, int(limit) // processes)}{fewer}{more}."
        yield Finding("cores", "warn", f"{wish} on {why}", remedy, numbers)
    elif got < _LEAST_SHARE * limit:
        message = f"{usable} busy threads got {got:.1f} cores' time: others compute here too"
        yield Finding("cores", "warn", message, "End them, or measure nothing now.", numbers)
    else:
        yield Finding("cores", "ok", f"{wish} on {usable} core(s), {got:.1f} of them free", "", numbers)
    if workers and processes * (each + workers) > _CROWD * limit:
        message = f"{processes} x {workers} loader workers beside {wanted} thread(s) on {limit:g} core(s)"
        remedy = "Sets that fit memory are read by no worker; for others try --workers 1."
        yield Finding("workers", "warn", message, remedy, {"workers": processes * workers})
    named = environ.get("OMP_NUM_THREADS", "")
    if named and (not named.isdigit() or int(named) * processes > limit):
        message = (
            f"OMP_NUM_THREADS={named} for {processes} process(es) on {limit:g} core(s); torch gets {each}, other "
            "libraries take the variable's"
        )
        yield Finding("OMP_NUM_THREADS", "warn", message, "Unset it.")


def memory(processes: int, available: float, granted: float | None) -> Finding:
    """Memory against processes. `available`: bytes that the host has without swapping; `granted`: by control groups."""
    left = min(available, granted if granted is not None else available)
    who = "a control group grants" if left < available else "the host has"
    least = "A process takes 0.4 GiB before it holds any data: use fewer (--nproc), or raise the limit."
    usual = "Use fewer processes (--nproc), a smaller --batch-size or set."
    return graded(
        "memory",
        f"{who} {left / _GIB:.1f} GiB for {processes} process(es)",
        {"available_gib": round(left / _GIB, 2), "limited": left < available},
        (left < processes * _LEAST_RANK, "fail", least),
        (left < processes * _USUAL_RANK, "warn", usual),
    )


def shm(workers: int, folder: Path = Path("/dev/shm")) -> Finding:
    """Shared memory, through which loader workers hand over batches, and NCCL's ranks communicate: allocates some."""
    check = "/dev/shm"
    if not folder.is_dir():
        return Finding(check, "skipped", f"{folder} does not exist here")
    space, trouble = os.statvfs(folder), ""
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="lockstep-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, _LEAST_SHM)
    except OSError as error:
        trouble = f"; 64 MiB of it can't be had: {error.strerror}"
    return graded(
        check,
        f"{free / _MIB:,.0f} of {size / _MIB:,.0f} MiB free{trouble}",
        {"size_mib": size // _MIB, "free_mib": free // _MIB},
        (bool(trouble and workers), "fail", _MORE_SHM),
        (bool(trouble) or free < _USUAL_SHM, "warn", _MORE_SHM),
    )


def open_files() -> Finding:
    """Open files and sockets that this process may have: opens so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    message, handles = f"ulimit -n is {soft}", list[int]()
    try:
        while len(handles) < _LEAST_FILES:
            handles.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        message = f"{len(handles)} more could be opened, not {_LEAST_FILES}: {error.strerror} (ulimit -n {soft})"
    finally:
        for handle in handles:
            os.close(handle)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    remedy = f"`ulimit -n {_USUAL_FILES}` before the run (the hard limit is {shown}); Slurm: --propagate=NOFILE."
    numbers = {"soft": soft, "hard": hard}
    return graded(
        "open files",
        message,
        numbers,
        (len(handles) < _LEAST_FILES, "fail", remedy),
        (soft < _USUAL_FILES, "warn", remedy),
    )
