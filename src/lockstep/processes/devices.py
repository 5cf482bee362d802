"""What this host offers: cores and devices, by torch's accelerator API."""

import torch

from lockstep.config import Execution
from lockstep.config.execution import ONE_PROCESS, processes_on
from lockstep.errors import UserError
from lockstep.processes.proc import cores

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
_LOOK = {
    "cuda": "Check nvidia-smi (rocm-smi for AMD) and CUDA_VISIBLE_DEVICES",
    "xpu": "Check xpu-smi and ZE_AFFINITY_MASK",
    "mps": "It needs Apple silicon, a recent macOS, and a Python for that processor, not for Intel's",
}


def device_name(device: torch.device) -> str:
    """A device's name for records: what decides, with the software, how its kernels round."""
    if device.type == "cpu":
        return f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def device_type(execution: Execution) -> str:
    """cpu, cuda (NVIDIA and AMD), mps or xpu: what `--device` and `--gpus` come to on this machine.

    Raises:
        UserError: for a device or GPUs that are not here, and GPUs of a CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator.type if accelerator is not None else "cpu"
    wanted = found if execution.device == "auto" else execution.device
    asked = f"--gpus {','.join(map(str, execution.gpus))}"
    if execution.gpus and execution.device == "cpu":
        raise UserError(f"{asked} with --device cpu", "Leave one of the two out.")
    if execution.gpus and found == "cpu":
        raise UserError(f"{asked} asks for GPUs, and this machine shows none", _where_to_look(wanted))
    if wanted not in ("cpu", found):
        raise UserError(f"--device {wanted}: this machine has no such device (found: {found})", _where_to_look(wanted))
    if execution.backend == "nccl" and wanted != "cuda":
        raise UserError(f"--backend nccl needs NVIDIA's or AMD's GPUs, and this run is on {wanted}", "Leave it out.")
    return wanted


def _where_to_look(kind: str) -> str:
    """What to do about an accelerator that is not seen."""
    built_for = torch.accelerator.current_accelerator()  # whether or not there is one
    if built_for is None:
        return "This torch is built for the CPU alone: install one for your GPU, or use --device cpu."
    if kind not in _LOOK:  # auto found nothing
        kind = built_for.type
    if kind != built_for.type:
        return f"This torch is built for {built_for.type}: install one for {kind}, or use --device cpu."
    return f"{_LOOK.get(kind, 'Check its driver')}, or use --device cpu."


def devices(execution: Execution) -> list[torch.device]:
    """The devices of this host that the run may use; one entry for the CPU."""
    kind = device_type(execution)
    if kind == "cpu":
        return [torch.device("cpu")]
    count = torch.accelerator.device_count()
    asked = f"--gpus {','.join(map(str, execution.gpus))}"
    if strange := [index for index in execution.gpus if not 0 <= index < count]:
        shown = f" among those that {_VISIBLE[kind]} shows" if kind in _VISIBLE else ""
        raise UserError(
            f"{asked}: there is no GPU {strange[0]}, this machine shows {count}",
            f"GPUs are numbered 0 to {count - 1}{shown}.",
        )
    if twice := [index for index in execution.gpus if execution.gpus.count(index) > 1]:
        raise UserError(
            f"{asked}: GPU {twice[0]} stands there twice",
            "Name each once. Several processes share one with --backend gloo and a larger --nproc.",
        )
    return [torch.device(kind, index) for index in execution.gpus or range(count)]


def process_count(execution: Execution) -> int:
    """Processes to start on this machine: --nproc, or one per GPU, or as many as `processes_on` says."""
    available = devices(execution)
    on_cpu = available[0].type == "cpu"
    if execution.strategy in ONE_PROCESS:
        return 1
    if execution.nproc == "auto":
        return processes_on(cores()) if on_cpu else max(1, len(available) // execution.model_parallel)
    wanted = execution.nproc * execution.model_parallel
    if not on_cpu and wanted > len(available) and execution.backend != "gloo":
        raise UserError(
            f"--nproc {execution.nproc} needs {wanted} GPUs, this machine offers {len(available)}",
            f"Use --nproc {len(available) // execution.model_parallel} (NCCL wants one each), or --device cpu.",
        )
    return execution.nproc


def own_devices(execution: Execution, local_rank: int) -> list[torch.device]:
    """The devices that a rank of this host drives: one for each stage of its model, in their order."""
    available, stages = devices(execution), execution.model_parallel
    return [available[(local_rank * stages + stage) % len(available)] for stage in range(stages)]


def rank_device(execution: Execution, local_rank: int, local_size: int) -> torch.device:
    """The device that a rank's world is on, its first.

    A process that sees as many devices as it drives was given its own, as by Slurm's --gpus-per-task; whether they are
    not another rank's too can be told when the ranks have met (`require_apart`).

    Raises:
        UserError: for more processes than NCCL takes on these GPUs.
    """
    available, stages = devices(execution), execution.model_parallel
    if available[0].type == "cpu":
        return available[0]
    if stages != len(available) < local_size * stages and execution.backend != "gloo":
        each = f" of {stages} stages" if stages > 1 else ""
        raise UserError(
            f"{local_size} processes{each} on this machine and {len(available)} GPU(s)",
            f"Use --nproc {max(1, len(available) // stages)}: one GPU for a process and stage, or several processes on "
            "one by --backend gloo.",
        )
    return own_devices(execution, local_rank)[0]


def require_apart(identities: list[str | None]) -> None:
    """Raise UserError where two ranks are on one device, by what `device_identity` says of each; None: not known."""
    for rank, identity in enumerate(identities):
        first = identities.index(identity)
        if identity is not None and first != rank:
            raise UserError(
                f"ranks {first} and {rank} are on the same GPU ({identity}), and NCCL takes one process for each",
                "Give each process one of its own (Slurm: --gpus-per-task=1), let all see all of them "
                "(--gpus-per-node), or use --backend gloo.",
            )


def device_identity(device: torch.device) -> str | None:
    """What no other device in the world is called, where the driver says it: a UUID."""
    if device.type in ("cpu", "mps"):
        return None
    uuid = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def has_streams(device: torch.device) -> bool:
    """True for accelerators that run several queues of work at once (CUDA, ROCm, XPU)."""
    return device.type not in ("cpu", "mps")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, copied through pinned memory so that the host need not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if has_streams(device) else tensor.to(device)
