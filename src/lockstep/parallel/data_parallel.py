"""nn.DataParallel, one process on several GPUs, with its traps closed.

In every forward pass it copies the module to all GPUs, cuts the batch, runs the copies in threads and gathers their
outputs on the first GPU, where the loss is that of the whole batch, whatever the cut.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.module_state import flattened, write_flat
from lockstep.parallel.sync import GradientSync


class Replicas(nn.DataParallel[nn.Module]):
    """nn.DataParallel whose copies compute in the caller's autocast dtype, and whose buffers count all of the batch.

    A new thread autocasts to its device's default, and torch hands on the switch without the dtype: bf16 would be fp16.
    And torch keeps the first copy's buffers alone, the running statistics of one GPU's part of the batch.
    """

    def replicate(self, module: nn.Module, device_ids: Sequence[int | torch.device]) -> list[nn.Module]:
        """A copy for each device; raises UserError for a compiled module."""
        if is_compiled(module):
            raise UserError(
                "a compiled module in nn.DataParallel: every copy would compute with the first GPU's weights",
                "Leave --compile out, or use --strategy ddp.",
            )
        return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """The outputs of the copies, which run in threads."""
        kind = self.src_device_obj.type
        calls: Sequence[Any] = replicas
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            calls = [torch.autocast(kind, dtype)(replica.__call__) for replica in replicas]
        outputs: list[Any] = super().parallel_apply(calls, inputs, kwargs)
        if self.module.training and len(replicas) > 1:
            _average_buffers(self.module, replicas)
        return outputs


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was asked for a module itself, in either way."""
    return module._compiled_call_impl is not None or isinstance(getattr(module, "_orig_mod", None), nn.Module)


def _average_buffers(module: nn.Module, replicas: Sequence[nn.Module]) -> None:
    """Floats become their mean over the copies, as `average_buffers` has it over ranks; all others are the first's."""
    columns = [[b for b in each.buffers() if b.is_floating_point()] for each in (module, *replicas)]
    if columns[0]:
        flat = [flattened(column, torch.float64) for column in columns[1:]]
        mean = sum((other.to(flat[0].device) for other in flat[1:]), flat[0]) / len(flat)  # equal ones keep their bits
        # by .data: autograd kept the buffer for a backward pass that does not read it, and would complain
        write_flat(mean, [b.data for b in columns[0]])


class ReplicaSync(GradientSync):
    """Nothing to do: the copies' gradients are added on the first GPU."""

    comparable = False

    def waited_ms(self) -> float | None:
        """Nobody can tell: the copies are made and gathered within the passes, where no clock stands."""
        return None


def data_parallel(model: nn.Module, world: World, devices: list[torch.device]) -> nn.Module:
    """The model in DataParallel over `devices`, its own first.

    Raises:
        UserError: for less than two GPUs, and in a run of several processes.
    """
    if world.size > 1:
        raise UserError(
            f"--strategy dp is one process, and a launcher has started {world.size}",
            "Start it without torchrun or mpirun, or use --strategy ddp.",
        )
    require_gpus(devices)
    return Replicas(model, device_ids=devices)


def require_gpus(devices: list[torch.device]) -> None:
    """Raise UserError where DataParallel would have nothing to do, or can't: it needs two GPUs of NVIDIA's or AMD's."""
    gpus = [device for device in devices if device.type != "cpu"]
    if len(gpus) < 2:
        raise UserError(
            f"--strategy dp needs two GPUs or more, and here {'is one' if gpus else 'there is only the CPU'}: "
            "nn.DataParallel would just call the module",
            "Use --strategy ddp (any number of processes, CPU included) or --strategy single.",
        )
    if gpus[0].type != "cuda":  # torch._C._broadcast and its like are compiled for CUDA and ROCm alone
        raise UserError(
            f"--strategy dp on {gpus[0].type}: nn.DataParallel copies between GPUs of NVIDIA's and AMD's alone",
            "Use --strategy ddp.",
        )


def replica_devices(model: nn.Module) -> list[torch.device]:
    """The devices of DataParallel's copies, the module's own first; empty for anything else."""
    if not isinstance(model, nn.DataParallel) or not model.device_ids:
        return []
    return [torch.device(model.src_device_obj.type, index) for index in model.device_ids]


def driven(model: nn.Module) -> list[torch.device]:
    """The devices that a module's passes run on in this process, the one with its first parameters first."""
    return replica_devices(model) or list(dict.fromkeys(parameter.device for parameter in model.parameters()))
