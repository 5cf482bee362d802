"""Exact mode with FSDP: the bits of DDP's, while each rank holds a part of the weights.

In the place of FSDP's reduce-scatter, which adds floats, each slice's gradient goes to those who own its parts (an
all-to-all: as many bytes), unadded. After the last slice an owner has its part of every slice's gradient, and adds them
as `ExactSync` does: as integers, on a scale of the whole tensor's maximum over all parts and slices.

All ranks have to run every pass, so one with a slice less than others runs a pass without samples. Memory beyond
FSDP's: V / N sets of gradients.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.buckets import largest
from lockstep.parallel.exact_buffers import ExactBuffers
from lockstep.parallel.fixed_point import add_fixed, from_fixed, scales
from lockstep.parallel.joints import Joints
from lockstep.parallel.modules import sum_in_order
from lockstep.parallel.repeatable import repeatable
from lockstep.parallel.sharded import local, whole
from lockstep.parallel.slices import seed_generators
from lockstep.parallel.sync import GradientSync, Reseed, Take
from lockstep.processes.world import World


class Exchange:
    """What FSDP calls in the place of a reduce-scatter: parts go to their owners, and nothing is added."""

    def __init__(self) -> None:
        self.received: list[tuple[Tensor, Tensor]] = []  # (what FSDP takes for the sum, parts [ranks, n]) of each unit
        self.silent = False  # this rank's pass had no sample

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP to put gradients into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Keep everybody's gradient of this rank's part of a unit."""
        del op, async_op
        if self.silent:
            input_tensor.zero_()
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        output_tensor.zero_()
        self.received.append((output_tensor, parts.view(group.size(), -1)))


class ShardedExactSync(GradientSync):
    """Gradients of a global batch's slices, added exactly by those who own the parts.

    Args:
        model: as `shard` made it.
        world: more than one rank.
        slices: V, the same for every N that shall agree.
    """

    exact = True

    def __init__(self, model: nn.Module, world: World, slices: int) -> None:
        self.model, self.world, self.slices = model, world, slices
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = ExactBuffers(model, world, slices)
        self.exchange = Exchange()
        self._begin()
        from torch.distributed.fsdp import FSDPModule

        joints = Joints(model, slices)
        for name, module in model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            if not hasattr(module, "set_custom_reduce_scatter"):
                raise UserError(
                    f"--exact {slices} with --strategy fsdp: torch {torch.__version__} lets nobody replace FSDP's "
                    "reduce-scatter, which adds floats",
                    "Use a torch that has FSDPModule.set_custom_reduce_scatter, or --strategy ddp.",
                )
            module.set_gradient_divide_factor(1.0)
            module.set_custom_reduce_scatter(cast(Any, self.exchange))  # its base class is private
            joints.watch(name, cast(nn.Module, module))

    def _begin(self) -> None:
        self.parts: list[list[Tensor]] = [[] for _ in self.parameters]  # of each slice's gradient, [n] each
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)  # DTensors to write into

    def cut(self, batch: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Slices in memory of their own."""
        return [part.clone() for part in torch.split(batch, list(sizes))]

    def passes(self, model: nn.Module, sizes: Sequence[int], reseed: Reseed, take: Take) -> list[Tensor]:
        """Every slice by itself, as many passes on each rank; those without a sample leave no trace."""
        results = []
        self._begin()
        self.buffers.begin()
        for i, size in enumerate(sizes):
            seed_generators(reseed(i), self.world.device)
            self.exchange.silent = size == 0
            self.buffers.enter(model)
            with repeatable(self.slices):
                results.append(take(model, i))
            changes = self.buffers.leave(model)
            if size:
                self.buffers.add(changes)
            self._collect()
        return results

    def _collect(self) -> None:
        """Which of the parts received is whose: FSDP's gradients are views of what it was given as their sum."""
        memory = {total.untyped_storage().data_ptr(): parts for total, parts in self.exchange.received}
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            mine, self.gradients[i], p.grad = local(p.grad), p.grad, None
            parts = memory.get(mine.untyped_storage().data_ptr())
            if mine.numel() and (parts is None or parts.dtype != mine.dtype):
                raise UserError(
                    f"--exact {self.slices} with --strategy fsdp: torch {torch.__version__} copies reduced gradients",
                    "Use --strategy ddp.",
                )
            if parts is not None and mine.numel():
                begin = mine.storage_offset()
                self.parts[i] += parts[:, begin : begin + mine.numel()].unbind()
        self.exchange.received.clear()

    def received(self, parameter: nn.Parameter) -> bool:
        """True where a slice gave a parameter a gradient."""
        return any(p is parameter and g is not None for p, g in zip(self.parameters, self.gradients, strict=True))

    @torch.no_grad()
    def finish(self) -> None:
        """Write the sums of this rank's parts, and the average change of the buffers."""
        exponents = largest(self.parts, self.world.device)
        dist.all_reduce(exponents, dist.ReduceOp.MAX)
        for p, parts, gradient, exponent in zip(self.parameters, self.parts, self.gradients, exponents, strict=True):
            if gradient is None:
                continue
            mine = local(gradient).view(-1)
            into, out_of = scales(exponent, self.slices, mine.dtype)
            sums = torch.empty(mine.shape, dtype=torch.int64, device=mine.device)
            if mine.device.type != "cpu":
                for part in parts:  # made on FSDP's own stream, which may use their memory anew once they are freed
                    part.record_stream(torch.accelerator.current_stream(mine.device))
            add_fixed(sums, parts, into)
            from_fixed(sums, out_of, mine)
            p.grad = gradient
        self.buffers.finish()
        self._begin()

    def total(self, amounts: Tensor, samples: int, count: int) -> Tensor:  # noqa: ARG002
        """In the order of the slices, whoever takes them; a pass without samples comes last, and is none of them."""
        cuts = min(self.slices, count)
        mine = self.world.share(cuts)
        return sum_in_order(self.world, amounts[: mine.stop - mine.start], cuts)

    def clip(self, parameters: Iterable[nn.Parameter], most: float) -> None:
        """As for whole gradients: a norm of parts would be added in an order of its own."""
        parameters = list(parameters)
        norms = [torch.linalg.vector_norm(whole(p.grad)) for p in parameters if p.grad is not None]
        nn.utils.clip_grads_with_norm_(parameters, most, torch.linalg.vector_norm(torch.stack(norms)))

    def waited_ms(self) -> float | None:
        """Nobody can tell: FSDP waits within the passes."""
        return None
