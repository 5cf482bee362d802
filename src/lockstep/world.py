"""Who am I among the processes of a run, and how do we talk."""

import os
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from lockstep.config import Execution
from lockstep.errors import PeerError, UserError
from lockstep.joining import JOB, adopt
from lockstep.meeting import choose_interface, fresh, meet
from lockstep.memory import keep_freed

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAST_RELEASES_S = 0.1
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
_LOOK = {
    "cuda": "Check nvidia-smi (rocm-smi for AMD) and CUDA_VISIBLE_DEVICES",
    "xpu": "Check xpu-smi and ZE_AFFINITY_MASK",
    "mps": "It needs Apple silicon, a recent macOS, and a Python for that processor, not for Intel's",
}


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them. Its size decides who does which share, and nothing else."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "World":
        """A world of one process, without a process group."""
        return cls(0, 1, 0, 1, torch.device(device), "none")

    def share(self, n: int) -> slice:
        """This rank's contiguous part of n things. Sizes differ by at most one; the first ranks get the larger ones."""
        return share_of(n, self.rank, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, values: list[int]) -> list[int]:
        """The largest over all ranks of each of a few integers, through the host."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def barrier(self) -> None:
        """Wait for all ranks, at most as long as the run's --timeout."""
        if self.size > 1:
            dist.barrier(device_ids=None if self.backend == "gloo" else [self.device.index])

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on all ranks (for small objects: it goes through the host)."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def print(self, *values: object) -> None:
        """Print on rank 0 alone."""
        if self.rank == 0:
            print(*values, flush=True)

    @contextmanager
    def first_on_host(self) -> Iterator[None]:
        """Run the body on the first rank of each host, then on the other ranks, which find the work done.

        Raises:
            PeerError: on the waiting ranks, where a host's first rank failed.
        """
        if self.local_rank > 0:
            self._raise_if_any_failed(self.gather(False))
            yield
            return
        try:
            yield
        except BaseException:
            self.gather(True)
            raise
        self._raise_if_any_failed(self.gather(False))

    def _raise_if_any_failed(self, failed: list[bool]) -> None:
        if any(failed):
            raise PeerError(f"rank {failed.index(True)} failed")


def share_of(n: int, rank: int, size: int) -> slice:
    """Rank's contiguous part of n things among `size` ranks, as `World.share`."""
    base, larger = divmod(n, size)
    start = rank * base + min(rank, larger)
    return slice(start, start + base + (rank < larger))


def joined(environ: MutableMapping[str, str] = os.environ) -> bool:
    """True where a launcher (torchrun, ours, mpirun or srun) started this process, one of several.

    What mpirun or srun said is in torchrun's variables afterwards. A torn environment raises UserError.
    """
    adopt(environ)
    present = [name for name in _LAUNCHER_VARIABLES if environ.get(name)]
    ranked = [name for name in present if not name.startswith("MASTER")]
    if not ranked:  # MASTER_ADDR alone is often exported for other programs
        return False
    if missing := [name for name in _LAUNCHER_VARIABLES if name not in present]:
        raise UserError(
            f"half a launcher environment: {', '.join(present)} set, {', '.join(missing)} not",
            "Start with `lockstep train --nproc N` or torchrun, which set all of them, or unset "
            + ", ".join(present)
            + ".",
        )
    values = {name: environ[name] for name in _LAUNCHER_VARIABLES if name != "MASTER_ADDR"}
    if bad := [f"{name}={value}" for name, value in values.items() if not (value.isascii() and value.isdigit())]:
        raise UserError(f"not a number: {', '.join(bad)}", "Start with `lockstep train --nproc N` or torchrun.")
    rank, size, local_rank, local_size = (int(values[name]) for name in _LAUNCHER_VARIABLES[:4])
    if not (rank < size and local_rank < local_size <= size and local_rank <= rank):
        described = " ".join(f"{name}={values[name]}" for name in _LAUNCHER_VARIABLES[:4])
        raise UserError(
            f"a contradictory launcher environment: {described}",
            "RANK runs from 0 to WORLD_SIZE - 1 and LOCAL_RANK from 0 to LOCAL_WORLD_SIZE - 1; start with torchrun.",
        )
    return True


@contextmanager
def join(execution: Execution, environ: MutableMapping[str, str] = os.environ) -> Iterator[World]:
    """Join the run that the environment describes (torchrun's variables, mpirun's or srun's), or be a world of one.

    Sets the process's CPU threads, its current device and, where it trains on the CPU, that freed memory is kept;
    leaves the process group at the end.

    Raises:
        UserError: for a torn environment, a missing device, or a group that does not come together.
    """
    grouped = joined(environ)
    rank, size, local_rank, local_size = (int(environ[k]) for k in _LAUNCHER_VARIABLES[:4]) if grouped else (0, 1, 0, 1)
    device = _device(execution, local_rank, local_size)
    torch.set_num_threads(execution.threads or max(1, cores() // local_size))
    if device.type == "cpu":
        keep_freed()
    else:
        torch.accelerator.set_device_index(device.index or 0)
    if size == 1:
        yield World(rank, size, local_rank, local_size, device, "none")
        return
    backend = execution.backend if execution.backend != "auto" else dist.get_default_backend_for_device(device)
    names = backend if backend == "gloo" or device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    limit = timedelta(seconds=execution.timeout)
    try:
        store = _store(environ, rank, size, execution.timeout)
        if local_size < size:
            choose_interface(store, environ["MASTER_ADDR"], rank, size, environ)
        dist.init_process_group(names, timeout=limit, store=store, rank=rank, world_size=size)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {rank} of {size} could not meet the others at "
            f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: {error}",
            "Check that the address is machine 0's, the port is free and open, and that all processes were started.",
        ) from error
    yield World(rank, size, local_rank, local_size, device, backend)
    # Not after an error: an orderly goodbye would wait for the others. The process ends, the launcher stops the rest.
    dist.destroy_process_group()
    # gloo's threads outlive the group, which DDP never lets go, and need the interpreter's lock to release the last
    # collective's tensors: one that waits for it while the interpreter ends aborts the process. Sleep gives it away.
    time.sleep(_LAST_RELEASES_S)


def _store(environ: MutableMapping[str, str], rank: int, size: int, seconds: float) -> Store:
    """The store of the ranks of this attempt."""
    if job := environ.get(JOB):
        return meet(job, environ["MASTER_ADDR"], rank, size, seconds)
    found, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds)))
    return fresh(found, rank, size, seconds)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def device_name(device: torch.device) -> str:
    """A device in words, for records: what decides, with the software, how its kernels round."""
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


def own_devices(execution: Execution, local_rank: int) -> list[torch.device]:
    """The devices that a rank of this host drives: one for each stage of its model, in their order."""
    available, stages = devices(execution), execution.model_parallel
    return [available[(local_rank * stages + stage) % len(available)] for stage in range(stages)]


def _device(execution: Execution, local_rank: int, local_size: int) -> torch.device:
    available, stages = devices(execution), execution.model_parallel
    if available[0].type == "cpu":
        return available[0]
    if local_size * stages > len(available) and execution.backend != "gloo":
        each = f" of {stages} stages" if stages > 1 else ""
        raise UserError(
            f"{local_size} processes{each} on this machine and {len(available)} GPU(s)",
            f"Use --nproc {max(1, len(available) // stages)}: one GPU for a process and stage, or several processes on "
            "one by --backend gloo.",
        )
    return own_devices(execution, local_rank)[0]
