"""Steps that are left out because a gradient is not finite: found, undone, and counted."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lockstep.parallel.modules import Kept
from lockstep.parallel.sharded import whole


class Skipping:
    """What a step needs to be left out.

    Args:
        asked: by `skip_nonfinite`; else nothing is kept and nothing is looked at.
        device: where the steps left out are counted, so that counting waits for nothing.
    """

    def __init__(self, asked: bool, device: torch.device) -> None:
        self.asked = asked
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    def before(self, model: nn.Module) -> Kept | None:
        """A copy of the buffers, which forward is about to write into; None where a step is not to be left out."""
        return Kept(model.modules()) if self.asked else None

    def undone(self, before: Kept | None, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a gradient is not finite, and the buffers are as they were before the step again.

        Waits for the device. The same on all ranks, as gradients are after their reduction.
        """
        if before is None or bool(finite(parameters)):
            return False
        before.restore()
        return True


def finite(parameters: Iterable[nn.Parameter]) -> Tensor:
    """bool []: whether all gradients are; by their norm, which takes a few kernels."""
    return torch.isfinite(whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])))
