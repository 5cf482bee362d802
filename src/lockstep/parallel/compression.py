"""Gradients that cross a slow link in fewer bytes, by torch's communication hooks for DDP.

What each gives up of the laws: `fp16` and `bf16` round every gradient to that type and add it up there, so results
differ from plain DDP's by that rounding, and with the number of processes. `powersgd:R` (Vogels, Karimireddy and Jaggi,
"PowerSGD: practical low-rank gradient compression for distributed optimization", 2019) sends a gradient matrix [n, m]
as two of [n, R] and [m, R]; what did not fit each rank adds to its next gradient. That memory is a rank's own, so it is
in no checkpoint: a resumed run starts it anew and differs from one that went through.
"""

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

PLAIN_STEPS = 10  # before PowerSGD begins: the first gradients are large, and DDP lays out its buckets anew after one

PowerSGD = powerSGD_hook.PowerSGDState


def compress_gradients(ddp: DistributedDataParallel, kind: str) -> PowerSGD | None:
    """Set DDP's communication hook, `kind` as `--compress` has it; the hook also divides, as DDP then does not.

    Returns what PowerSGD keeps from step to step.
    """
    name, _, rank = kind.partition(":")
    if name == "powersgd":
        state = PowerSGD(ddp.process_group, matrix_approximation_rank=int(rank), start_powerSGD_iter=PLAIN_STEPS)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return state
    if name != "none":
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        ddp.register_comm_hook(ddp.process_group, hooks[name])
    return None


def forget(state: PowerSGD) -> None:
    """Start PowerSGD anew: first some plain steps, without what earlier gradients left behind."""
    state.iter = 0
    for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
        memory.clear()
