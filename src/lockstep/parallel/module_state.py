"""What a module holds beside its parameters' gradients: kept, put back, and made the same on all ranks.

A forward pass may put another tensor in a buffer's place (`self.center = 0.9 * self.center + ...`). So nothing here
holds a buffer's tensor over a forward pass: it is looked up by module and name each time.
"""

import copy
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.parallel.hidden_state import put_back

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


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was asked for a module itself, in either way."""
    return module._compiled_call_impl is not None or isinstance(getattr(module, "_orig_mod", None), nn.Module)


def driven(model: nn.Module) -> list[torch.device]:
    """The devices that a module's passes run on in this process, the one with its first parameters first."""
    return list(dict.fromkeys(parameter.device for parameter in model.parameters()))


class Places:
    """Where some modules hold buffers, by module and name, with the tensors that are there now.

    Args:
        modules: without their children. A module that stands in several places counts once.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(modules))
        self.held = [dict(module._buffers) for module in self.modules]

    def put(self, held: Iterable[dict[str, Tensor | None]]) -> None:
        """Let the modules hold these tensors, and no others."""
        for module, buffers in zip(self.modules, held, strict=True):
            if isinstance(module, torch.jit.ScriptModule):
                for name, buffer in buffers.items():
                    setattr(module, name, buffer)
                continue
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
def preserved_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
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
    with ExitStack() as hooks:
        for p in own:
            hooks.enter_context(p.register_hook(_zeros))  # type: ignore[no-untyped-call]
        yield


def _zeros(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient)


_zeros.lockstep = True  # type: ignore[attr-defined]  # see parameter_hooks.py


@contextmanager
def replaced(holder: Any, **attributes: Any) -> Iterator[None]:
    """Within, an object, a class or a module has these attributes; afterwards those that it had."""
    before = {name: getattr(holder, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


def deep_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """copy.deepcopy of a model, also where its forward keeps tensors with a history in attributes, as pruning does."""
    computed = (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf)
    return copy.deepcopy(model, (memo or {}) | {id(t): t.detach().clone() for t in computed})


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


_CONTAINERS = (list, dict, set, deque)
_STRUCTURE = {"_parameters", "_modules"}  # of a module: FSDP swaps parameters there, and knows which it has put in


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Within, forward passes may do to the model what they like: all is as before afterwards.

    Every module has copies of its buffers, of other tensors that are its attributes, and of its lists, dicts, sets and
    deques, one level deep; afterwards the attributes are what they were, and a hook that has removed itself is there
    again. The originals are not written to otherwise, so this works in the middle of a forward pass too. Parameters
    are the model's own. Generators and the filters of warnings are put back. Costs a copy of the buffers.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(put_back({}, {p.device for p in model.parameters()}))
        copies: dict[int, Any] = {}  # what two modules share, their copies share
        for module in model.modules():
            hooks = [(value, [*value.items()]) for value in vars(module).values() if isinstance(value, OrderedDict)]
            stack.callback(_put_back, module, dict(module.__dict__), hooks)
        for module in model.modules():
            attributes = module.__dict__
            attributes.update({k: _copied(value, copies) for k, value in attributes.items() if k not in _STRUCTURE})
            attributes["_buffers"].update({name: _copied(b, copies) for name, b in attributes["_buffers"].items()})
        yield


def copy_frozen(model: nn.Module) -> None:
    """Within `preserved_state`: forward may write into parameters that are not trained, as momentum encoders do."""
    copies: dict[int, nn.Parameter] = {}
    for module in model.modules():
        held = vars(module)
        for name, p in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if not p.requires_grad and not hasattr(p, "full_tensor"):
                copy = copies.setdefault(id(p), nn.Parameter(p.detach().clone(), requires_grad=False))
                held["_parameters"] = held["_parameters"] | {name: copy}


def _put_back(module: nn.Module, attributes: dict[str, Any], hooks: list[tuple[Any, list[Any]]]) -> None:
    module.__dict__.clear()
    module.__dict__.update(attributes)
    for held, items in hooks:  # a hook's handle knows this dict, and would not find a copy
        if [*held.items()] != items:
            held.clear()
            held.update(items)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return copies.setdefault(id(value), value.detach().clone())
    return copies.setdefault(id(value), copy.copy(value)) if type(value) in _CONTAINERS else value
