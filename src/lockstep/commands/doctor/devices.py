"""Do torch, CUDA, the driver and NCCL agree, and does each device compute?"""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil

import lockstep
from lockstep.commands.doctor.children import Child, Report
from lockstep.commands.doctor.finding import Finding, graded
from lockstep.processes.proc import nvidia_driver

_TESTED = 512  # rows of the matrices that each device multiplies
_INSTALL = "as pytorch.org/get-started says for your CUDA"
_LITTLE_GIB = 2.0


@dataclass
class Machine:
    """Software and devices as found."""

    torch: str = ""  # empty: not looked at
    cuda: str = ""  # that torch was built for, as 13.0; empty: none
    kind: str = "cpu"  # cuda, mps, xpu
    backend: str = ""  # for collectives of such devices
    count: int = 0
    names: list[str] = field(default_factory=list)
    free_gib: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # devices that do not compute, and why
    error: str = ""  # of torch, looking for devices
    nvidia: int = 0  # NVIDIA devices that the kernel shows
    driver: str = ""  # of NVIDIA, as 550.54.15
    driver_cuda: str = ""  # the newest CUDA that the driver supports
    nccl_built: str = ""  # as 2.27.5
    nccl_loaded: str = ""
    hidden: str | None = None  # CUDA_VISIBLE_DEVICES
    versions: dict[str, str] = field(default_factory=dict)


def look(report: Report, wanted: str) -> Machine:
    """What this machine has for computing. `wanted`: what --device says."""
    report("asking the NVIDIA driver")
    machine = Machine(driver=nvidia_driver(), hidden=os.environ.get("CUDA_VISIBLE_DEVICES"))
    machine.nvidia = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    machine.driver_cuda = _driver_cuda() if machine.nvidia else ""
    installed = {name: version(name) for name in ("torch", "torchvision", "numpy")}
    machine.versions = {"lockstep": lockstep.__version__, **installed}
    report("importing torch")
    import torch
    import torch.distributed as dist

    from lockstep.processes.devices import device_name
    from lockstep.processes.memory import free_bytes

    machine.torch, machine.cuda = torch.__version__, torch.version.cuda or ""
    if machine.cuda:
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # CUDA's own: there is no generic call
        machine.nccl_built = ".".join(map(str, numbers)) if isinstance(numbers, tuple) else ""
        machine.nccl_loaded = _nccl_loaded()
    if wanted == "cpu":
        return machine
    report("looking for devices through torch")
    accelerator = None
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None and machine.nvidia and machine.cuda:
            torch.zeros(1, device="cuda")  # raises CUDA's own reason
    except (RuntimeError, AssertionError) as error:
        machine.error = str(error).splitlines()[0]
    if accelerator is None:
        return machine
    machine.kind, machine.count = accelerator.type, torch.accelerator.device_count()
    machine.backend = dist.get_default_backend_for_device(accelerator)
    for index in range(machine.count):
        device = torch.device(machine.kind, index)
        report(f"computing on {device}")
        machine.names.append(device_name(device))
        try:
            compute(str(device))
            machine.free_gib.append(round(free_bytes(device) / 2**30, 1))
        except (RuntimeError, ArithmeticError) as error:
            machine.wrong.append(f"{device}: {str(error).splitlines()[0]}")
    return machine


def compute(device: str) -> None:
    """Multiply integers on a device, exactly.

    Raises:
        ArithmeticError: where the product is not the CPU's.
        RuntimeError: torch's own, of the device.
    """
    import torch

    # sums of 512 products of -4..4 are exact in float32, and in TF32 too
    left = (torch.arange(_TESTED * _TESTED) % 9 - 4).reshape(_TESTED, _TESTED).float()
    if not torch.equal((left.to(device) @ left.to(device).T).cpu(), left @ left.T):
        raise ArithmeticError("a product of matrices is wrong")


def _driver_cuda() -> str:
    """The newest CUDA that the driver's own library supports, as 12.4; empty where there is no such library."""
    number = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return ""
    return "" if code else f"{number.value // 1000}.{number.value % 1000 // 10}"


def _nccl_loaded() -> str:
    """The version of the NCCL that this process has loaded, which LD_LIBRARY_PATH may have chosen."""
    paths = [each.path for each in psutil.Process().memory_maps() if "libnccl" in each.path]
    if not paths:
        return ""  # built into torch
    number = ctypes.c_int()
    ctypes.CDLL(paths[0]).ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value % 10000 // 100}.{number.value % 100}"


def unseen(child: Child, seconds: float) -> Finding:
    """The finding where looking at the machine failed or did not end."""
    if child.error:
        remedy = "Install torch and Lockstep anew in a fresh environment."
        return Finding("torch", "fail", f"{child.stage}: {child.error}", remedy)
    remedy = (
        "A driver or device hangs: `nvidia-smi` and `dmesg | grep -i -e nvrm -e xid`; often only a restart of the "
        "machine helps. --device cpu leaves the devices alone."
    )
    return Finding("devices", "fail", f"no answer in {seconds:g} s, {child.place}", remedy)


def agreement(machine: Machine) -> Iterator[Finding]:
    """torch, CUDA and driver.

    A torch built for CUDA x.y runs with any driver for CUDA x.0 or newer (docs.nvidia.com/deploy/cuda-compatibility,
    "Minor Version Compatibility").
    """
    build = f"torch {machine.torch}, built for {f'CUDA {machine.cuda}' if machine.cuda else 'no CUDA'}"
    seen = f"{machine.nvidia} NVIDIA device(s)"
    if not machine.nvidia or machine.kind not in ("cpu", "cuda"):
        what = f"{machine.count} {machine.kind} device(s)" if machine.count else "no GPU in this machine"
        yield Finding("torch", "ok", f"{build}; {what}")
    elif not machine.cuda:
        remedy = f"Install a torch with CUDA, {_INSTALL}; or use --device cpu."
        yield Finding("torch", "fail", f"{seen}, and {build}", remedy)
    elif not machine.driver_cuda:
        remedy = "Install the NVIDIA driver; in a container start it with --gpus all (NVIDIA's container toolkit)."
        yield Finding("driver", "fail", f"{seen}, {build}, and no driver library (libcuda.so.1)", remedy)
    else:
        message = f"{build}; driver {machine.driver or '?'} supports CUDA up to {machine.driver_cuda}"
        major = machine.driver_cuda.partition(".")[0]
        old = int(machine.cuda.partition(".")[0]) > int(major)
        remedy = f"A newer driver, or a torch built for CUDA {major}, {_INSTALL}."
        numbers = {"cuda": machine.cuda, "driver_cuda": machine.driver_cuda}
        yield graded("driver", message, numbers, (old, "fail", remedy))
    if machine.nvidia and machine.nccl_built:
        built, loaded = machine.nccl_built, machine.nccl_loaded or machine.nccl_built
        wanted, found = (tuple(map(int, each.split("."))) for each in (built, loaded))
        message = built if found == wanted else f"torch was built with NCCL {built}, and loads {loaded}"
        older = found < wanted or found[0] != wanted[0]
        remedy = "Another NCCL comes first: unset LD_LIBRARY_PATH and LD_PRELOAD, or install torch anew."
        newer = "Well unless another machine loads another one: all ranks need the same."
        yield graded("NCCL version", message, {}, (older, "fail", remedy), (found != wanted, "warn", newer))


def computing(machine: Machine, wanted: str) -> Iterator[Finding]:
    """Each device, through torch's accelerator API. `wanted`: what --device says."""
    check, kind = "devices", machine.kind
    if wanted == "cpu":
        yield Finding(check, "skipped", "--device cpu")
    elif not machine.count and machine.nvidia and machine.cuda:
        why = f": {machine.error}" if machine.error else ""
        hidden = f" CUDA_VISIBLE_DEVICES is {machine.hidden!r}." if machine.hidden is not None else ""
        remedy = f"See `nvidia-smi`, the rights of /dev/nvidia*, and the finding on the driver.{hidden}"
        yield Finding(check, "fail", f"{machine.nvidia} NVIDIA device(s), and torch sees none{why}", remedy)
    elif not machine.count and wanted == "auto":
        why = f" ({machine.error})" if machine.error else ""
        yield Finding(check, "skipped", f"no accelerator: the CPU computes{why}")
    elif not machine.count:
        yield Finding(check, "fail", f"--device {wanted}: torch finds no accelerator", "Use --device cpu, or auto.")
    elif wanted not in ("auto", kind):
        yield Finding(check, "fail", f"--device {wanted}: torch finds {kind}", f"Use --device {kind}.")
    if wanted == "cpu" or not machine.count:
        return
    if machine.wrong:
        remedy = "Leave it out by CUDA_VISIBLE_DEVICES or --gpus; `nvidia-smi -q` and dmesg show broken memory."
        yield Finding(check, "fail", "; ".join(machine.wrong), remedy)
        return
    free = min(machine.free_gib, default=0.0)
    full = 0 < free < _LITTLE_GIB
    where = f"on {kind}:{machine.free_gib.index(free)}" if full else "at least"
    names = ", ".join(dict.fromkeys(machine.names))
    message = f"{machine.count} x {names}: each multiplies right; {free:g} GiB free {where}"
    remedy = "Others hold its memory (nvidia-smi shows who): end them, or use other devices by --gpus."
    yield graded(check, message, {"free_gib": machine.free_gib}, (full, "warn", remedy))
