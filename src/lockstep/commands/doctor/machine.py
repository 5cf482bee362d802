"""This machine: torch, CUDA, driver and NCCL, its devices, a launcher's variables, cores, /dev/shm, files, the disk."""

import ctypes
import errno
import hashlib
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lockstep.commands.doctor.plan import Finding, Plan, graded
from lockstep.config.execution import processes_on
from lockstep.distributed import proc
from lockstep.distributed.files import atomic_write
from lockstep.errors import UserError

_ROWS = 512  # of the matrices that each device multiplies
_LITTLE_GIB = 2.0
_INSTALL = "as pytorch.org/get-started says for your CUDA"
_MIB, _GIB = 2**20, 2**30
_SPIN_S, _LEAST_SHARE = 0.4, 0.7  # of the cores' time
_FEW_FILES, _USUAL_FILES = 256, 1024
_FEW_SHM, _USUAL_SHM = 64 * _MIB, 512 * _MIB  # the first is what Docker gives
_WRITTEN, _LONGEST_S = 64 * _MIB, 2.0  # of writing; a slower disk gets less to write
_SLOW = 20 * _MIB  # bytes/s: ResNet-50 with its momentum, 200 MB, takes 10 s
_LEAST_FREE, _USUAL_FREE = 1 * _GIB, 5 * _GIB


@dataclass
class Machine:
    """Software and devices as found."""

    torch: str = ""  # empty: not looked at
    cuda: str = ""  # that torch was built for, as 13.0; empty: none
    kind: str = "cpu"  # cuda, xpu
    backend: str = ""  # for collectives of such devices
    names: list[str] = field(default_factory=list)  # of each device
    free_gib: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # devices that do not compute, and why
    error: str = ""  # of torch, looking for devices
    nvidia: int = 0  # NVIDIA devices that the kernel shows
    driver: str = ""  # of NVIDIA, as 550.54.15
    driver_cuda: str = ""  # the newest CUDA that the driver supports
    nccl_built: str = ""  # as 2.27.5
    nccl_loaded: str = ""


def look(wanted: str) -> Iterator[str | Machine]:
    """What this machine has for computing. `wanted`: what --device says."""
    yield "asking the NVIDIA driver"
    machine = Machine(driver=proc.nvidia_driver())
    machine.nvidia = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    machine.driver_cuda = _driver_cuda() if machine.nvidia else ""
    yield "importing torch"
    import torch
    import torch.distributed as dist

    from lockstep.distributed.devices import device_name

    machine.torch, machine.cuda = torch.__version__, torch.version.cuda or ""
    if machine.cuda:
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # CUDA's own: there is no generic call
        machine.nccl_built = ".".join(map(str, numbers)) if isinstance(numbers, tuple) else ""
        machine.nccl_loaded = _nccl_loaded()
    accelerator = None
    if wanted != "cpu":
        yield "looking for devices through torch"
        try:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            if accelerator is None and machine.nvidia and machine.cuda:
                torch.zeros(1, device="cuda")  # raises CUDA's own reason
        except (RuntimeError, AssertionError) as error:
            machine.error = str(error).splitlines()[0]
    if accelerator is not None:
        machine.kind, machine.backend = accelerator.type, dist.get_default_backend_for_device(accelerator)
        for index in range(torch.accelerator.device_count()):
            device = torch.device(machine.kind, index)
            yield f"computing on {device}"
            machine.names.append(device_name(device))
            try:
                compute(str(device))
                machine.free_gib.append(round(torch.accelerator.get_memory_info(device)[0] / 2**30, 1))
            except (RuntimeError, ArithmeticError) as error:
                machine.wrong.append(f"{device}: {str(error).splitlines()[0]}")
    yield machine


def compute(device: str) -> None:
    """Multiply integers on a device, exactly. Raises ArithmeticError for a wrong product, and torch's RuntimeError."""
    import torch

    # sums of 512 products of -4..4 are exact in float32, and in TF32 too
    left = (torch.arange(_ROWS * _ROWS) % 9 - 4).reshape(_ROWS, _ROWS).float()
    if not torch.equal((left.to(device) @ left.to(device).T).cpu(), left @ left.T):
        raise ArithmeticError("a product of matrices is wrong")


def _driver_cuda() -> str:
    """The newest CUDA that the driver's own library supports, as 12.4; empty where there is no such library."""
    number = ctypes.c_int()
    with suppress(OSError):
        if not ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return f"{number.value // 1000}.{number.value % 1000 // 10}"
    return ""


def _nccl_loaded() -> str:
    """The version of the NCCL that this process has loaded, which LD_LIBRARY_PATH may have chosen; "": torch's own."""
    number = ctypes.c_int()
    for path in [each.path for each in psutil.Process().memory_maps() if "libnccl" in each.path][:1]:
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value % 10000 // 100}.{number.value % 100}" if number.value else ""


def agreement(machine: Machine, wanted: str) -> Iterator[Finding]:
    """torch, CUDA, driver, NCCL, and each device. `wanted`: what --device says.

    A torch built for CUDA x.y runs with any driver for CUDA x.0 or newer (docs.nvidia.com/deploy/cuda-compatibility,
    "Minor Version Compatibility").
    """
    build, seen = f"built for CUDA {machine.cuda or 'none'}", f"{machine.nvidia} NVIDIA device(s)"
    nvidia = bool(machine.nvidia) and machine.kind in ("cpu", "cuda")
    built, supported = (int(text.partition(".")[0] or 0) for text in (machine.cuda, machine.driver_cuda))
    driver = f", driver {machine.driver or '?'} for CUDA up to {machine.driver_cuda or 'none'}" if nvidia else ""
    absent = "Install the NVIDIA driver; in a container start it with --gpus all (NVIDIA's container toolkit)."
    yield graded(
        "torch",
        f"torch {machine.torch}, {build}; {seen}{driver}",
        (nvidia and not built, "fail", f"Install a torch with CUDA, {_INSTALL}."),
        (nvidia and not supported, "fail", absent),
        (nvidia and built > supported, "fail", f"A newer driver, or a torch built for CUDA {supported}, {_INSTALL}."),
    )
    if machine.nvidia and machine.nccl_built:
        loaded = machine.nccl_loaded or machine.nccl_built
        here, there = (tuple(map(int, each.split("."))) for each in (machine.nccl_built, loaded))
        yield graded(
            "NCCL version",
            f"torch was built with NCCL {machine.nccl_built}, and loads {loaded}",
            (there < here or there[0] != here[0], "fail", "Unset LD_LIBRARY_PATH and LD_PRELOAD, or reinstall torch."),
            (there != here, "warn", "Fine unless another machine loads another one: all ranks need the same."),
        )
    count, free = len(machine.names), min(machine.free_gib, default=0.0)
    if wanted == "cpu" or (wanted == "auto" and not count and not (machine.nvidia and built)):
        yield Finding("devices", "skipped", "the CPU computes")
        return
    hidden = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
    names = f"{count} x {', '.join(dict.fromkeys(machine.names)) or machine.kind}: {free:g} GiB free at least"
    yield graded(
        "devices",
        "; ".join(filter(None, [names, *machine.wrong, machine.error])),
        (not count, "fail", f"torch sees none: check `nvidia-smi` and the rights of /dev/nvidia*; {hidden}."),
        (wanted not in ("auto", machine.kind), "fail", f"Use --device {machine.kind}."),
        (bool(machine.wrong), "fail", "Leave it out by --gpus; `nvidia-smi -q` and dmesg show broken memory."),
        (free < _LITTLE_GIB, "warn", "Other programs hold the memory (see nvidia-smi): end them, or use --gpus."),
    )


def launcher(_plan: Plan, _machine: Machine, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Would a run from this shell take itself for a rank of another one?"""
    from lockstep.distributed.environment import launcher_ranks

    try:
        ranks = launcher_ranks(dict(environ))
        message = f"rank {ranks[0]} of {ranks[1]}: a run from here waits for others" if ranks else "none started this"
        yield graded("launcher", message, (bool(ranks), "warn", "Start doctor without one, and unset a leftover RANK."))
    except UserError as error:
        yield Finding("launcher", "fail", error.message, error.remedy)


def capacity(plan: Plan, machine: Machine) -> Iterator[str | Finding]:
    """Cores, memory, shared memory and open files, against what a run would take."""
    usable = proc.cores()
    processes = (len(machine.names) or processes_on(usable)) if plan.nproc == "auto" else plan.nproc
    yield "computing on all cores"
    yield cores(processes, usable, proc.cpu_quota(), cores_got(usable))
    yield "allocating shared memory"
    yield shm()
    yield open_files()


def cores_got(threads: int) -> float:
    """Cores' worth of time that so many threads get when all of them compute."""

    def spin(until: float) -> None:
        while time.perf_counter() < until:
            hashlib.sha256(bytes(_MIB))  # lets go of the interpreter's lock

    began, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(spin, [began + _SPIN_S] * threads))
    return (time.process_time() - used) / (time.perf_counter() - began)


def cores(processes: int, usable: int, quota: float | None, got: float) -> Finding:
    """Cores against threads. `quota`: what a control group grants, None: no limit; `got`: of busy threads, in cores."""
    threads, limit = processes * max(1, usable // processes), min(usable, quota or usable)
    fewer = f" --nproc {int(limit) or 1}" if processes > limit else ""
    return graded(
        "cores",
        f"{threads} threads of {processes} process(es) on {usable} core(s), {limit:g} granted, {got:.1f} of them free",
        (threads > limit, "warn", f"Use --threads {max(1, int(limit) // processes)}{fewer}, or raise the limit."),
        (got < _LEAST_SHARE * limit, "warn", "Other programs compute here too: end them, or measure nothing now."),
    )


def shm(folder: Path = Path("/dev/shm")) -> Finding:
    """Shared memory, through which NCCL's ranks communicate: allocates some."""
    if not folder.is_dir():
        return Finding("/dev/shm", "skipped", f"{folder} does not exist here")
    free, trouble = psutil.disk_usage(str(folder)).free, ""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="lockstep-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, _FEW_SHM)
    except OSError as error:
        trouble = f"; 64 MiB of it can't be had: {error.strerror}"
    remedy = "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory."
    short = bool(trouble) or free < _USUAL_SHM
    return graded("/dev/shm", f"{free / _MIB:,.0f} MiB free{trouble}", (short, "warn", remedy))


def open_files() -> Finding:
    """Open files and sockets that this process may have: opens so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    trouble, handles = "", list[int]()
    try:
        while len(handles) < _FEW_FILES:
            handles.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        trouble = f"; {len(handles)} more could be opened, not {_FEW_FILES}: {error.strerror}"
    finally:
        for handle in handles:
            os.close(handle)
    remedy = f"`ulimit -n {_USUAL_FILES}` before the run (the hard limit is {hard}); Slurm: --propagate=NOFILE."
    cases = (bool(trouble), "fail", remedy), (soft < _USUAL_FILES, "warn", remedy)
    return graded("open files", f"ulimit -n is {soft}{trouble}", *cases)


def storage(plan: Plan, _: Machine) -> Iterator[str | Finding]:
    """The disk of the run folders."""
    runs = Path(plan.out or "runs").absolute()
    yield f"writing 64 MiB to {runs}"
    yield disk(next(path for path in (runs, *runs.parents) if path.exists()))


def disk(folder: Path) -> Finding:
    """Writes as a checkpoint is written: a folder of its own, fsync, rename, fsync of the folder."""
    freer = "Free some space there, keep less (--keep 1), or name another folder by --out."
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".lockstep-doctor-") as own:
            chunk, written, began = os.urandom(4 * _MIB), 0, time.perf_counter()
            with atomic_write(Path(own, "tensors")) as part, part.open("wb") as file:
                while written < _WRITTEN and time.perf_counter() - began < _LONGEST_S:
                    written += file.write(chunk)
            rate = written / (time.perf_counter() - began)
        free = psutil.disk_usage(str(folder)).free
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        other = f"Name another folder by --out, or make {folder} a folder that this user may write."
        return Finding("checkpoint disk", "fail", f"{folder}: {error.strerror}", freer if full else other)
    return graded(
        "checkpoint disk",
        f"{folder}: writes {rate / _MIB:,.0f} MiB/s with fsync, {free / _GIB:,.1f} GiB free",
        (free < _LEAST_FREE, "fail", freer),
        (rate < _SLOW, "warn", "Use a local disk by --out, or checkpoint less often: --checkpoint-every."),
        (free < _USUAL_FREE, "warn", freer),
    )
