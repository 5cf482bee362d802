"""Between a unit and its input FSDP puts an autograd function, to learn when the unit's backward pass is over.

It computes nothing, and still can change an ulp. Autograd makes a view of what such a function returns as it came: the
same elements, but the stride of a dimension of size 1 may be another one. No element depends on that, but which kernel
a convolution takes: with a single sample a permuted view was channels last before, and isn't after it. And it adds the
gradients of the input's uses inside the unit before those of uses elsewhere, where autograd would add one by one.
"""

from collections import Counter, deque
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.errors import UserError

_Edge = tuple[Any, int]  # a node of the autograd graph, and which of what it returned


class Joint(NamedTuple):
    """Where a unit's input enters it: the unit's name, FSDP's node, what layers inside use, what FSDP was given."""

    unit: str
    node: Any
    inside: _Edge
    outside: _Edge


class _Strided(torch.autograd.Function):
    """The same elements with strides of their own; the gradient passes as it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strides: tuple[int, ...]) -> Tensor:
        del ctx
        return x.as_strided(x.shape, strides, x.storage_offset())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx
        return gradients[0], None


class Joints:
    """Hands a unit its input with the strides that it would have without FSDP; notes joints until `check`.

    Args:
        model: the root, with FSDP's hooks.
        slices: V, for the message.
    """

    def __init__(self, model: nn.Module, slices: int) -> None:
        self.slices = slices
        self.found: list[Joint] | None = []
        model.register_forward_hook(self._check)

    def watch(self, name: str, unit: nn.Module) -> None:
        """Register hooks around FSDP's own, which are there already."""
        strides: dict[Any, tuple[int, ...]] = {}  # by where the elements are, of the call under way
        edges: set[_Edge] = set()

        def note(x: Tensor) -> Tensor:
            if x.requires_grad:
                edges.add((x.grad_fn, x.output_nr))
                strides[_place(x)] = x.stride()
            return x

        def restore(x: Tensor) -> Tensor:
            before = strides.get(_place(x)) if x.requires_grad else None
            if before is None or (x.grad_fn, x.output_nr) in edges:
                return x
            after = x if x.stride() == before else cast(Tensor, _Strided.apply(x, before))
            if self.found is not None and x.grad_fn is not None:
                outside = x.grad_fn.next_functions[x.output_nr]
                self.found.append(Joint(name, x.grad_fn, (after.grad_fn, after.output_nr), cast(_Edge, outside)))
            return after

        def before_fsdp(module: nn.Module, args: Any, kwargs: Any) -> None:
            del module
            if torch.is_grad_enabled():
                tree_map_only(Tensor, note, (args, kwargs))

        def after_fsdp(module: nn.Module, args: Any, kwargs: Any) -> Any:
            del module
            result = tree_map_only(Tensor, restore, (args, kwargs)) if strides else None
            strides.clear()
            edges.clear()  # they would hold the graph
            return result

        unit.register_forward_pre_hook(before_fsdp, prepend=True, with_kwargs=True)
        unit.register_forward_pre_hook(after_fsdp, with_kwargs=True)

    def _check(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the first forward pass: refuse a sum of gradients that FSDP would group in another way."""
        del module, args
        ends = [(x.grad_fn, x.output_nr) for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn]
        if not ends or self.found is None:
            return
        found, self.found = self.found, None
        uses = _uses(ends) if found else Counter()
        within, times = Counter[tuple[str, Any, _Edge]](), Counter[tuple[str, Any, _Edge]]()
        for unit, node, inside, outside in found:
            within[unit, node, outside] += uses[inside]
            times[unit, node, outside] += 1  # the same tensor may be several arguments
        for (unit, node, outside), count in within.items():
            others = uses[outside] - times[unit, node, outside]
            if uses[outside] > 1 and count > 1 and count + others > 2:  # the order of two doesn't matter
                raise UserError(
                    f"--exact {self.slices} with --strategy fsdp: {unit} uses an input {count} times, and "
                    f"{others} more use it: FSDP would add its gradients in another order",
                    "Use --strategy ddp.",
                )


def _place(x: Tensor) -> Any:
    return x.data_ptr(), x.shape, *(stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1)


def _uses(ends: list[_Edge]) -> Counter[_Edge]:
    """How many gradients autograd adds for each tensor of the graph that leads to `ends`."""
    uses = Counter(ends)
    waiting, seen = deque(node for node, _ in ends), {node for node, _ in ends}
    while waiting:
        for node, number in waiting.popleft().next_functions:
            if node is not None:
                uses[node, number] += 1
                if node not in seen:
                    seen.add(node)
                    waiting.append(node)
    return uses
