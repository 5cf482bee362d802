"""DistributedDataParallel around a user's module, with its traps closed.

Gradients cross a slow link in fewer bytes by `--compress fp16` or `bf16`: a communication hook rounds every gradient to
that type and adds it up there, so results differ from plain DDP's by that rounding, and with N.
"""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import CommConfig
from lockstep.distributed.world import World
from lockstep.parallel.sync import BackwardSync

_ROUNDED = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _rounded_sum(dtype: torch.dtype, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP's communication hook: the sum of the ranks' gradients, sent and added in `dtype`, which nothing divides."""
    rounded = bucket.buffer().to(dtype)

    def widened(future: Future[list[Tensor]]) -> Tensor:
        return bucket.buffer().copy_(future.value()[0])

    return dist.all_reduce(rounded, async_op=True).get_future().then(widened)


# torch 2.15 renamed the flag and warns of the old name
_BUFFER_FLAG = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)

_FIRST, _SELDOM = 10, 100  # DDP reads its clocks on the first steps, and then on every so many


class LockstepDDP(DistributedDataParallel):
    """DistributedDataParallel over one device or several, whose buffers are not broadcast before each forward pass.

    That would cost a collective a step, let ranks differ after the last step and hang a rank with an empty share.
    """

    def __init__(
        self, model: nn.Module, world: World, find_unused_parameters: bool = False, compress: str = "none"
    ) -> None:
        several = len({parameter.device for parameter in model.parameters()}) > 1  # then DDP takes no device_ids
        super().__init__(
            model,
            device_ids=None if several or world.device.type == "cpu" else [world.device],
            gradient_as_bucket_view=True,
            # not static_graph: its first backward pass may not be one under no_sync (an internal assertion of torch
            # ends accumulation there), and it saves work only where parameters go unused
            find_unused_parameters=find_unused_parameters,
        )
        self.every = [*self.parameters()]
        self.reduced = [p.requires_grad for p in self.every]
        # Off only now: as an argument it also kept torch < 2.15 from making the initial buffers rank 0's.
        setattr(self, _BUFFER_FLAG, False)
        self.compress = compress
        if compress != "none":
            self.register_comm_hook(_ROUNDED[compress], _rounded_sum)

    def _post_forward(self, output: Any) -> Any:
        """Where forward has frozen layers, DDP must not wait for their gradients in the backward pass."""
        with nullcontext() if self.reduced == [p.requires_grad for p in self.every] else self.no_sync():
            return super()._post_forward(output)  # type: ignore[no-untyped-call]


class DDPSync(BackwardSync):
    """DDP's own all-reduce. It averages, as torch's communication hooks do, and so its result is multiplied by N."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp, ddp.process_group.size())
        self.ddp, self.rate = ddp, _SELDOM
        self.known = {p: p.requires_grad for p in ddp.parameters()}  # when DDP was made
        self.by_hand = False
        if isinstance(ddp, LockstepDDP):
            self.known = dict(zip(ddp.every, ddp.reduced, strict=True))
            self.link = CommConfig(cast(Any, ddp.compress))
            self.comparable = ddp.compress == "none"
        self.take_parameters()
        if next(ddp.parameters()).device.type == "cpu":  # on a GPU it would wait for the device in each step
            self.rate = 1
            ddp._set_ddp_runtime_logging_sample_rate(self.rate)  # type: ignore[no-untyped-call]
        self.noted, self.waited = (0, 0.0), 0.0  # how often its clocks were read, and the wait in all, in ns

    def take_parameters(self) -> None:
        """Also those of new layers, which begin with rank 0's values."""
        self.every = [*self.ddp.parameters()]
        self.reduced = [self.known.get(p, False) for p in self.every]  # by DDP; others' gradients are none of its
        self.waits_for_gone = sum(self.known.values()) > sum(self.reduced)  # for layers that the model has no longer
        modules = [m for m in self.ddp.modules() if getattr(m, "sparse", False)]
        self.sparse = {id(p) for m in modules for p in m.parameters(recurse=False)}
        for p in self.every:
            if p not in self.known:
                dist.broadcast(p.detach(), 0)
                self.known[p] = False

    def _trained(self) -> list[bool]:
        return [p.requires_grad for p in self.every]

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """no_sync must cover the forward pass too: DDP decides there whether the backward pass will reduce.

        DDP waits for the gradients of those parameters that were trained when it was made. If others are now, as where
        layers are frozen for some epochs, it does not reduce, and `finish` does. So too where some may go unused: DDP
        takes those for used that passes beside its own have used, the self-check's. And where a gradient is sparse:
        DDP divides others by N twice then (torch 2.14).
        """
        unused = self.ddp.find_unused_parameters and self.comparable  # else there are no passes beside its own
        self.by_hand = unused or bool(self.sparse) or self.waits_for_gone or self._trained() != self.reduced
        waits = last and not self.ddp.find_unused_parameters
        self.marks = [None if p.grad is None else (p.grad, p.grad._version) for p in self.every] if waits else []
        return nullcontext() if last and not self.by_hand else self.ddp.no_sync()

    def without_gradient(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Also those that an earlier shard alone has used: DDP has waited for them in the last one."""
        missing, marks = super().without_gradient(parameters), self.marks
        self.marks = []
        if marks and not self.by_hand:
            every = zip(self.every, marks, strict=True)
            unused = {id(p) for p, mark in every if mark and p.grad is mark[0] and p.grad._version == mark[1]}
            missing += [p for p in parameters if id(p) in unused]
        return missing

    def finish(self) -> None:
        """From the ranks' mean to their sum: exact where N is a power of 2."""
        trained, self.marks = self._trained(), []
        self.by_hand |= isinstance(self.ddp, LockstepDDP) and trained != self.reduced  # by forward: DDP did not reduce
        if not self.by_hand and self.link.compress == "none":
            gradients = [p.grad for p, known in zip(self.every, self.reduced, strict=True) if known]
            torch._foreach_mul_([g for g in gradients if g is not None], self.ranks)
        own = zip(self.every, self.reduced, trained, strict=True)
        left = [p for p, known, now in own if now and (self.by_hand or not known)]
        if left and self.ddp.find_unused_parameters:  # what no rank has used keeps no gradient; waits for the device
            used = torch.tensor([p.grad is not None for p in left], dtype=torch.int32, device=left[0].device)
            dist.all_reduce(used)
            left = [p for p, ranks in zip(left, used.tolist(), strict=True) if ranks]
        pending = []
        for p in left:
            if p.grad is None:
                p.grad = torch.zeros_like(p).to_sparse(1) if id(p) in self.sparse else torch.zeros_like(p)
            pending.append(dist.all_reduce(p.grad, async_op=True))
        for work in pending:
            work.wait()

    def waited_ms(self) -> float | None:
        """From the end of the backward computation to the last bucket's arrival, by DDP's own clocks.

        The mean over the steps since the last call; on a GPU over those of them whose clocks DDP reads, which are the
        first ten and every hundredth; where there is none, what was found last.
        """
        clocks = self.ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time")  # ns, the mean since the first
        if not all(name in clocks for name in names):
            return None
        reduction, hidden = (float(clocks[name]) for name in names)
        steps = int(clocks["iteration"])
        read = min(steps, _FIRST) + max(0, steps // self.rate - _FIRST // self.rate)
        total, (read_before, before) = (reduction - hidden) * read, self.noted
        if read > read_before:
            self.waited = max(0.0, (total - before) / (read - read_before)) / 1e6
            self.noted = read, total
        return self.waited
