"""The devices of this host, by torch's accelerator API, and their memory."""

import ctypes
import os
import resource

import torch

from lockstep.config import Execution
from lockstep.config.execution import processes_on
from lockstep.distributed.proc import cores
from lockstep.errors import UserError

_LOOK = (
    "nvidia-smi, rocm-smi or xpu-smi shows the GPUs; CUDA_VISIBLE_DEVICES and ZE_AFFINITY_MASK may hide some. "
    "Install a torch that is built for it, or use --device cpu."
)


def device_name(device: torch.device) -> str:
    """A device's name for records."""
    if device.type == "cpu":
        return f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def device_type(execution: Execution) -> str:
    """cpu, cuda (NVIDIA and AMD) or xpu: what `--device` and `--gpus` come to here; UserError where not here."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator.type if accelerator is not None else "cpu"
    wanted = found if execution.device == "auto" else execution.device
    asked = f"--gpus {','.join(map(str, execution.gpus))}"
    if execution.gpus and execution.device == "cpu":
        raise UserError(f"{asked} with --device cpu", "Leave one of the two out.")
    if wanted not in ("cpu", found) or (execution.gpus and found == "cpu"):
        built_for = torch.accelerator.current_accelerator() or "the CPU alone"  # whether or not one is there
        what = f"this machine has no such device (found: {found}; this torch is built for {built_for})"
        raise UserError(f"{asked if execution.gpus else f'--device {wanted}'}: {what}", _LOOK)
    if execution.backend == "nccl" and wanted != "cuda":
        raise UserError(f"--backend nccl needs NVIDIA's or AMD's GPUs, and this run is on {wanted}", "Leave it out.")
    return wanted


def devices(execution: Execution) -> list[torch.device]:
    """The devices of this host that the run may use; one entry for the CPU."""
    kind = device_type(execution)
    if kind == "cpu":
        return [torch.device("cpu")]
    count = torch.accelerator.device_count()
    if strange := [index for index in execution.gpus if not 0 <= index < count]:
        asked = f"--gpus {','.join(map(str, execution.gpus))}"
        raise UserError(f"{asked}: there is no GPU {strange[0]}, this machine shows {count}", _LOOK)
    return [torch.device(kind, index) for index in execution.gpus or range(count)]


def process_count(execution: Execution) -> int:
    """Processes to start on this machine: --nproc, or one per GPU, or as many as `processes_on` says."""
    available = devices(execution)
    if execution.nproc == "auto":
        on_cpu = available[0].type == "cpu"
        return processes_on(cores()) if on_cpu else len(available)
    _require_enough(available, execution.nproc, execution)
    return execution.nproc


def _require_enough(available: list[torch.device], processes: int, execution: Execution) -> None:
    """NCCL wants a device for each process. Raises UserError where there are fewer."""
    if available[0].type != "cpu" and processes > len(available) and execution.backend != "gloo":
        raise UserError(
            f"--nproc {processes} needs {processes} GPUs, this machine offers {len(available)}",
            f"Use --nproc {len(available)}, or several on one by --backend gloo.",
        )


def rank_device(execution: Execution, local_rank: int, local_size: int) -> torch.device:
    """A rank's device. Raises UserError for more processes than these GPUs take.

    A process that sees a single one was given its own, as by Slurm's --gpus-per-task.
    """
    available = devices(execution)
    if len(available) > 1:
        _require_enough(available, local_size, execution)
    return available[local_rank % len(available)]


def has_streams(device: torch.device) -> bool:
    """True for accelerators that run several queues of work at once (CUDA, ROCm, XPU)."""
    return device.type != "cpu"


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, copied through pinned memory so that the host need not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if has_streams(device) else tensor.to(device)


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's malloc.h
_OWN_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> bool:
    """Have glibc's malloc keep what this process frees, for the next step; False where that is not in its hands.

    By default an activation of more than 32 MB is mapped, faulted in page by page, zeroed and unmapped again in every
    step: on two cores that was a third of the time of a small network at batch 2,000. Settings of the user's own in the
    environment are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl
    if mallopt is None or any(os.environ.get(name) for name in _OWN_SETTINGS):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


def peak_gib(device: torch.device) -> float:
    """The most memory that this process has held at once: of the device, or resident on the host for a CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
