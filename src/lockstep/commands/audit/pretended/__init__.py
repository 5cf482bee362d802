"""A pretended CUDA: GPU scripts run on the CPU, unchanged, and hear what they would hear from `devices` GPUs.

Answered: torch.cuda and torch.accelerator (devices, streams, events, seeds and random states of each GPU, memory
figures); tensors moved by `cuda`, `to`, device arguments and default devices, `device` and `is_cuda` of what is
computed from them; files that say where a tensor was; NCCL by gloo, with its refusals; DDP with device_ids,
SyncBatchNorm, GradScaler. Two devices in one function are an error, as on GPUs.

Not answered: autocast computes in float32; torch.compile returns the model as it is; DataParallel is one device;
CUDA graphs raise; memory is always free, streams are always done; draws on a GPU are other numbers than CUDA's;
`isinstance(t, torch.cuda.FloatTensor)`; a tensor of a thread or by autograd's own code says cpu.
"""

from lockstep.commands.audit.events import emit
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.pretended import cuda, distributed, tensors


def install(plan: Plan) -> None:
    """Pretend a GPU for each process, where the plan wants it."""
    if plan.cuda:
        pretend(plan.nproc // plan.nodes, emit)


def pretend(devices: int, emit: cuda.Emit) -> None:
    """Put all of it in torch's places, in this process, for good; events `device` go to `emit(event, **values)`."""
    state = cuda.Pretend(devices, emit)
    for part in (tensors, cuda, distributed):
        part.install(state)
