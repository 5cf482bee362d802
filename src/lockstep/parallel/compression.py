"""Gradients that cross a slow link in fewer bytes, by torch's communication hooks for DDP.

What each gives up of the laws: `fp16` and `bf16` round every gradient to that type and add it up there, so results
differ from plain DDP's by that rounding, and with the number of processes. `powersgd:R` (Vogels, Karimireddy and Jaggi,
"PowerSGD: practical low-rank gradient compression for distributed optimization", 2019) sends a gradient matrix [n, m]
as two of [n, R] and [m, R]; what did not fit each rank adds to its next gradient. That memory is a rank's own, so it is
in no checkpoint: a resumed run starts it anew and differs from one that went through.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

PLAIN_STEPS = 10  # before PowerSGD begins: the first gradients are large, and DDP lays out its buckets anew after one

# Added to a column's norm. torch's own 0 makes NaN of a gradient of zeros.
_EPSILON = 1e-30


class PowerSGD:
    """torch's PowerSGD hook, mended in two places.

    It sends three times for a bucket, the second and third time from callbacks in other threads. What else is sent
    meanwhile (the next bucket, batch norm's sums, DDP's map of unused parameters) meets it in another order on another
    rank: an abort, or one tensor's sum taken for another's. So it has a process group of its own, and a bucket begins
    when the one before it has arrived; backward goes on meanwhile.

    A gradient of zeros leaves factors of zeros, which nothing would move any more: where a factor is exactly 0, a
    tiny fixed noise stands in, from which the next step finds its directions.
    """

    def __init__(self, rank: int) -> None:
        self.state = powerSGD_hook.PowerSGDState(
            dist.new_group(),
            matrix_approximation_rank=rank,
            start_powerSGD_iter=PLAIN_STEPS,
            orthogonalization_epsilon=_EPSILON,
        )
        self._before: Future[Tensor] | None = None  # the bucket that was begun last
        self._noise: dict[int, Tensor] = {}  # by bucket

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Of DDP, for each bucket in the order of their numbers."""
        if self._before is not None:
            self._before.wait()
        factors = self.state.q_memory_dict.get(bucket.index())
        if factors is not None:
            self._stir(factors, bucket.index())
        future: Future[Tensor] = powerSGD_hook.powerSGD_hook(self.state, bucket)
        self._before = None if bucket.is_last() else future
        return future

    def _stir(self, factors: Tensor, bucket: int) -> None:
        noise = self._noise.get(bucket)
        if noise is None:
            generator = torch.Generator().manual_seed(bucket)  # the same on all ranks
            noise = torch.randn(factors.shape, generator=generator).mul_(1e-20).to(factors)
            self._noise[bucket] = noise
        factors.copy_(torch.where(factors == 0, noise, factors))

    def forget(self) -> None:
        """Start anew: first some plain steps, without what earlier gradients left behind."""
        self._before = None
        self.state.iter = 0
        self._noise.clear()
        for memory in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            memory.clear()


def compress_gradients(ddp: DistributedDataParallel, kind: str) -> PowerSGD | None:
    """Set DDP's communication hook, `kind` as `--compress` has it; the hook also divides, as DDP then does not.

    Returns what PowerSGD keeps from step to step. All ranks call it together.
    """
    name, _, rank = kind.partition(":")
    if name == "powersgd":
        powersgd = PowerSGD(int(rank))
        ddp.register_comm_hook(powersgd, PowerSGD.hook)
        return powersgd
    if name != "none":
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        ddp.register_comm_hook(ddp.process_group, hooks[name])
    return None
