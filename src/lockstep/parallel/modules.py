"""What a module holds beside its parameters' gradients: kept, put back, and made the same on all ranks."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.processes.world import World


def flattened(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All elements of some tensors, one tensor after the other: [n]."""
    return torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])


@torch.no_grad()
def write_flat(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """The inverse of `flattened`: give the tensors these elements."""
    for tensor, values in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def average_buffers(model: nn.Module, ranks: int) -> None:
    """Make the buffers of so many ranks the same: floats become their mean, all others rank 0's. All call it together.

    Where batch normalisation is local, each rank's saw its share alone. Averaged are the distances from rank 0's, in
    float64, so that equal values keep their bits for any number of ranks, infinite ones too.
    """
    buffers = [torch.view_as_real(b) if b.is_complex() else b for b in model.buffers()]
    floats = [b for b in buffers if b.is_floating_point()]
    others = [b for b in buffers if not b.is_floating_point()]
    if ranks > 1 and floats:
        mine = flattened(floats, torch.float64)
        first = mine.clone()
        dist.broadcast(first, 0)
        distance = torch.where(mine == first, 0.0, mine - first)
        dist.all_reduce(distance)
        write_flat(first + distance / ranks, floats)
    if ranks > 1 and others:
        flat = flattened(others, torch.int64)
        dist.broadcast(flat, 0)
        write_flat(flat, others)


@contextmanager
def preserved(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the tensors' values back afterwards."""
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def buffers_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    """The modules' own buffers as they are now: module, name, buffer, copy. By name, since a forward pass may put
    another tensor in a buffer's place."""
    return [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module.named_buffers(recurse=False)
    ]


@torch.no_grad()
def put_back(kept: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """The inverse of `buffers_of`."""
    for module, name, buffer, value in kept:
        buffer.copy_(value)
        setattr(module, name, buffer)


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Within, backward passes give every parameter a gradient of zeros, whatever comes; not where it is sharded.

    A factor of 0 would let a dummy's infinities through, as NaN.
    """
    own = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "full_tensor")]
    hooks = [p.register_hook(torch.zeros_like) for p in own]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Within, the whole model is in evaluation mode; parts that a user has put there stay there afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def copy_from_first(model: nn.Module, world: World) -> None:
    """Make rank 0's parameters and buffers everyone's, where a user's model draws its own on each rank."""
    if world.size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)
