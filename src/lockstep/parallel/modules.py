"""What a module holds beside its parameters' gradients: kept, put back, and made the same on all ranks.

A forward pass may write into a buffer, or put another tensor in its place (`self.center = 0.9 * self.center + ...`). So
nothing here holds a buffer's tensor over a forward pass: it is looked up by module and name each time.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.processes.world import World

# bytes; kernels choose their paths, and with them the order of their sums, by the address of what they read
_ALIGNED, _ALIGNED_DEVICE = 64, 512


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it doesn't begin at an address that torch's own allocator would give it."""
    to = _ALIGNED if tensor.device.type == "cpu" else _ALIGNED_DEVICE
    return tensor.clone() if tensor.data_ptr() % to else tensor


def flattened(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All elements of some tensors, one tensor after the other: [n], on the first one's device."""
    device = tensors[0].device  # a model in stages has several
    return torch.cat([tensor.detach().reshape(-1).to(device, dtype) for tensor in tensors])


@torch.no_grad()
def write_flat(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """The inverse of `flattened`: give the tensors these elements."""
    for tensor, values in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def sum_in_order(world: World, mine: Tensor, count: int) -> Tensor:
    """The sum [] of `count` numbers of which each rank has its share, the same bits on any number of ranks."""
    table = mine.new_zeros(count)  # the other ranks' zeros round nothing
    table[world.share(count)] = mine
    return world.sum(table).sum()


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor [...] seen as its real and imaginary parts [..., 2]; any other one as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def unequal(a: Tensor, b: Tensor) -> Tensor:
    """bool [...]: where two tensors differ; NaN is the same as NaN here."""
    return (a != b) & ((a == a) | (b == b)) if a.is_floating_point() else a != b


def all_finite(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether all elements are finite. Waits for the device once; the memory of one truth value an element."""
    flags = [torch.isfinite(tensor).all().to(device) for tensor in tensors]
    return not flags or bool(torch.stack(flags).all())


def keep_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Copy gradients that another pass will add to: the next replay of a CUDA graph writes into its own ones."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def average_buffers(model: nn.Module, ranks: int) -> None:
    """Make the buffers of so many ranks the same: floats become their mean, all others rank 0's. All call it together.

    Where batch normalisation is local, each rank's saw its share alone. Means are float64, taken of the differences to
    rank 0's: what is equal on all ranks keeps its bits, infinities too.
    """
    if ranks == 1:
        return
    buffers = [as_real(b) for b in model.buffers()]
    floats = [b for b in buffers if b.is_floating_point()]
    others = [b for b in buffers if not b.is_floating_point()]
    if floats:
        mine = flattened(floats, torch.float64)
        first = mine.clone()
        dist.broadcast(first, 0)
        beyond = torch.where(unequal(mine, first), mine - first, 0.0)
        dist.all_reduce(beyond)
        write_flat(torch.where(beyond == 0, first, first + beyond / ranks), floats)
    if others:
        flat = flattened(others, torch.int64)
        dist.broadcast(flat, 0)
        write_flat(flat, others)


class Places:
    """Where some modules hold buffers, by module and name, with the tensors that are there now.

    Args:
        modules: without their children. A module that stands in several places counts once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(modules))
        self.held = [dict(module._buffers) for module in self.modules]

    def now(self) -> list[dict[str, Tensor | None]]:
        """What is there at present, name -> buffer for each module."""
        return [dict(module._buffers) for module in self.modules]

    def put(self, held: Iterable[dict[str, Tensor | None]]) -> None:
        """Let the modules hold these tensors, and no others."""
        for module, buffers in zip(self.modules, held, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)

    def copies(self) -> list[dict[str, Tensor | None]]:
        """Copies of what was there at first, in memory of their own; a tensor that two places share has one copy."""
        made: dict[int, Tensor] = {}
        for buffers in self.held:
            for tensor in buffers.values():
                if tensor is not None and id(tensor) not in made:
                    made[id(tensor)] = tensor.detach().clone()
        return [{name: None if t is None else made[id(t)] for name, t in buffers.items()} for buffers in self.held]


class Kept:
    """The buffers of some modules as they are now, values and tensors, to be put back."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.places = Places(modules)
        self.values = self.places.copies()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back each tensor that was there, with the value it had."""
        self.places.put(self.places.held)
        for buffers, values in zip(self.places.held, self.values, strict=True):
            for name, tensor in buffers.items():
                if tensor is not None and (value := values[name]) is not None:
                    tensor.copy_(value)


@contextmanager
def preserved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put the modules' own buffers back afterwards, whether forward writes into them or replaces them."""
    kept = Kept(modules)
    try:
        yield
    finally:
        kept.restore()


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
            whole = tensor.detach().contiguous()  # a collective fills memory without gaps
            dist.broadcast(whole, 0)
            tensor.detach().copy_(whole)
