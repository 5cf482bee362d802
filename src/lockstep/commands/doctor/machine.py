"""What a machine has for computing, looked at by a process of its own: a broken driver may hang whoever asks."""

import ctypes
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import lockstep
from lockstep.commands.doctor.children import Heard, Tell, run
from lockstep.processes.proc import nvidia_driver

_TESTED = 512  # rows of the matrices that each device multiplies


@dataclass(frozen=True)
class Machine:
    """Software and devices as found."""

    torch: str
    built: str = ""  # the CUDA that torch was built for, as 13.0; empty: none
    kind: str = "cpu"  # cuda, mps, xpu
    backend: str = ""  # that ranks on such devices talk over
    count: int = 0
    names: tuple[str, ...] = ()
    free_gib: tuple[float, ...] = ()
    wrong: tuple[str, ...] = ()  # devices that do not compute, and why
    error: str = ""  # of torch, looking for devices
    nvidia: int = 0  # NVIDIA devices that the kernel shows
    driver: str = ""  # of NVIDIA, as 550.54.15
    speaks: str = ""  # the newest CUDA that the driver knows
    nccl_built: str = ""  # as 2.27.5
    nccl_loaded: str = ""
    hidden: str | None = None  # CUDA_VISIBLE_DEVICES
    versions: dict[str, str] = field(default_factory=dict)


def look(seconds: float, wanted: str, environ: Mapping[str, str] = os.environ) -> tuple[Machine | None, Heard]:
    """This machine; None where the process that looked gave no answer, of which the second value tells."""
    (heard,) = run([(_look, (wanted,))], seconds, environ)
    return (Machine(**heard.value) if heard.well else None), heard


def _look(tell: Tell, wanted: str) -> dict[str, Any]:
    tell("asking the NVIDIA driver")
    nvidia = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    found: dict[str, Any] = {"nvidia": nvidia, "driver": nvidia_driver(), "speaks": _speaks() if nvidia else ""}
    found["hidden"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = {name: _version(name) for name in ("torch", "torchvision", "numpy")}
    found["versions"] = {"lockstep": lockstep.__version__, **installed}
    tell("importing torch")
    import torch
    import torch.distributed as dist

    found |= {"torch": torch.__version__, "built": torch.version.cuda or ""}
    if found["built"]:
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # CUDA's own: there is no generic call
        found["nccl_built"] = ".".join(map(str, numbers)) if isinstance(numbers, tuple) else ""
        found["nccl_loaded"] = _nccl_loaded()
    if wanted == "cpu":
        return asdict(Machine(**found))
    tell("looking for devices through torch")
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        count = torch.accelerator.device_count() if accelerator is not None else 0
    except RuntimeError as error:
        return asdict(Machine(**found, error=str(error).splitlines()[0]))
    if accelerator is None or count == 0:
        if nvidia and found["built"]:
            found["error"] = _cuda_error()
        return asdict(Machine(**found))
    found |= {"kind": accelerator.type, "count": count, "backend": dist.get_default_backend_for_device(accelerator)}
    module, names, free, wrong = torch.get_device_module(accelerator), [], [], []
    for index in range(count):
        tell(f"computing on {accelerator.type}:{index}")
        names.append(module.get_device_name(index) if hasattr(module, "get_device_name") else accelerator.type)
        try:
            compute(f"{accelerator.type}:{index}")
            free.append(round(module.mem_get_info(index)[0] / 2**30, 1) if hasattr(module, "mem_get_info") else 0.0)
        except (RuntimeError, ArithmeticError) as error:
            wrong.append(f"{accelerator.type}:{index}: {str(error).splitlines()[0]}")
    return asdict(Machine(**found, names=tuple(names), free_gib=tuple(free), wrong=tuple(wrong)))


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


def _speaks() -> str:
    """The newest CUDA that the driver's own library knows, as 12.4; empty where there is no such library."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number = ctypes.c_int()
    return (
        f"{number.value // 1000}.{number.value % 1000 // 10}"
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0
        else ""
    )


def _nccl_loaded() -> str:
    """The version of the NCCL that this process has loaded, which LD_LIBRARY_PATH may have chosen."""
    paths = [each.path for each in psutil.Process().memory_maps() if "libnccl" in each.path]
    if not paths:
        return ""  # built into torch
    number = ctypes.c_int()
    ctypes.CDLL(paths[0]).ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value % 10000 // 100}.{number.value % 100}"


def _cuda_error() -> str:
    """Why CUDA does not start, in torch's words."""
    import torch

    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
