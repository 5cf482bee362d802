"""The folders of runs and of data: may they be written, how fast, and how much fits."""

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from lockstep.commands.doctor.finding import Finding, graded, within
from lockstep.commands.doctor.plan import Plan
from lockstep.processes.files import atomic_write

_MIB, _GIB = 2**20, 2**30
_CHUNK, _WRITTEN = 4 * _MIB, 64 * _MIB
_LONGEST_S = 2.0  # of writing; a slower disk gets less to write
_SLOW = 20 * _MIB  # bytes/s: ResNet-50 with its momentum, 200 MB, takes 10 s
_LEAST_FREE, _USUAL_FREE = 1 * _GIB, 5 * _GIB


def checks(plan: Plan) -> Iterator[Finding]:
    """The checks of this part."""
    yield runs(plan.out, plan.timeout)
    yield data(plan.data_dir, os.environ.get("LOCKSTEP_DATA", ""))


def _write(folder: Path) -> float:
    """Write as a checkpoint is written (a folder of its own, fsync, rename, fsync of the folder); bytes/s."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".lockstep-doctor-") as own:
        whole, chunk, written = Path(own, "tensors"), os.urandom(_CHUNK), 0
        began = time.perf_counter()
        with atomic_write(whole) as part, part.open("wb") as file:
            while written < _WRITTEN and time.perf_counter() - began < _LONGEST_S:
                written += file.write(chunk)
        seconds = time.perf_counter() - began
        if whole.stat().st_size != written:
            raise OSError(errno.EIO, f"{whole.stat().st_size} bytes there of {written} written")
        return written / seconds


def runs(out: str, seconds: float) -> Finding:
    """The disk of the run folders, `--out`."""
    check, folder = "checkpoint disk", Path(out or "runs").absolute()
    if folder.exists() and not folder.is_dir():
        return Finding(check, "fail", f"{folder} is no folder", "Name another one by --out.")
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    freer = "Free some space there, keep less (--keep 1), or name another folder by --out."
    try:
        rate = within(seconds, _write, place)
        free = psutil.disk_usage(str(place)).free
    except TimeoutError:
        remedy = "Its file server does not answer, or is overloaded: check the mount, or name another folder by --out."
        return Finding(check, "fail", f"{place}: a write of 64 MiB did not end in {seconds:g} s", remedy)
    except OSError as error:
        other = f"Name another folder by --out, or make {place} writable for this user."
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return Finding(check, "fail", f"{place}: {error.strerror}", freer if full else other)
    return graded(
        check,
        f"{place}: writes {rate / _MIB:,.0f} MiB/s with fsync, {free / _GIB:,.1f} GiB free",
        {"write_mib_per_s": round(rate / _MIB, 1), "free_gib": round(free / _GIB, 2)},
        (free < _LEAST_FREE, "fail", freer),
        (rate < _SLOW, "warn", "Use a local disk by --out, or checkpoint less often: --checkpoint-every."),
        (free < _USUAL_FREE, "warn", freer),
    )


def data(data_dir: str, environ_dir: str) -> Finding:
    """The folder of the data sets: there and readable, or one that a download could make."""
    check, folder = "data folder", Path(data_dir or environ_dir or "data").absolute()
    source = "--data-dir" if data_dir else "LOCKSTEP_DATA" if environ_dir else "--data-dir's default"
    if folder.is_dir():
        try:
            entries = len(list(folder.iterdir()))
        except OSError as error:
            return Finding(check, "fail", f"{folder} ({source}): {error.strerror}", "Make it readable for this user.")
        return Finding(check, "ok", f"{folder} ({source}): readable, {entries} entries", numbers={"entries": entries})
    if folder.exists():
        return Finding(check, "fail", f"{folder} ({source}) is no folder", "Name the folder that holds the data sets.")
    if data_dir or environ_dir:
        remedy = "Correct the name or mount it; a data set that can be downloaded would be put there."
        return Finding(check, "warn", f"{folder} ({source}) does not exist", remedy)
    return Finding(check, "ok", f"{folder} does not exist yet; the bundled digits need none")
