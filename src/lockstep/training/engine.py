"""A backward pass and an update without the Python that torch puts around them: a quarter of a tiny step's time.

What torch's own functions do beyond this is left out where nobody would notice, and they are called where somebody
would: a profiler, a hook, a tensor of a class of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torchs


class Scalars(dict[tuple[float, torch.dtype, torch.device], Tensor]):
    """Numbers as kept scalars: a new one costs microseconds, and a copy to its device."""

    def __missing__(self, key: tuple[float, torch.dtype, torch.device]) -> Tensor:
        number, dtype, device = key
        found = self[key] = torch.full((), number, dtype=dtype, device=device)
        return found


def backward(loss: Tensor, weight: Tensor) -> None:
    """`loss.backward(weight)` for scalars: gradients of loss * weight, without that product.

    A copy of `weight` is taken: a parameter's gradient may be a view of it.
    """
    if type(loss) is Tensor:
        torch.autograd._engine_run_backward(  # type: ignore[attr-defined]
            (loss,), (weight.clone(),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        loss.backward(weight.clone())  # type: ignore[no-untyped-call]


def may_draw(optimizer: Any) -> bool:
    """Whether an update may draw noise: torch's optimizers by themselves don't, and seeding costs 4 us or more."""
    plain = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
    return not plain or bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torchs._global_optimizer_pre_hooks
        or torchs._global_optimizer_post_hooks
    )


def update(optimizer: Any) -> None:
    """`optimizer.step()` for one that has no hooks and draws nothing, told to a profiler where there is one."""
    step = type(optimizer).step
    if getattr(step, "hooked", False) and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        step.__wrapped__(optimizer)
    else:
        optimizer.step()
