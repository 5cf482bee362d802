"""The optimizer of the `cifar10-speed` recipe: Muon on filters of constant size, SGD for the little else.

From the published description of airbench94_muon (K. Jordan, github.com/KellerJordan/cifar10-airbench, and "Muon: an
optimizer for hidden layers in neural networks", 2024).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import OptimConfig
from lockstep.training.optimizers import GroupOptimizer

# For a mean loss; airbench's are for the sum over 2,000 samples and outputs divided by 256.
_BIAS_LR, _HEAD_LR = 0.053 * 2000, 0.67 * 2000 / 256**2
_SGD_MOMENTUM = 0.85
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # pushes singular values into about [0.7, 1.2]
_ITERATIONS = 3


def muon_sgd(model: nn.Module, optim: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """Muon with rate `lr` and `optim.momentum` for the convolutions' filters, SGD for biases and linear layers.

    `optim.weight_decay` is the part of a bias or linear weight that a step at the peak rate takes away.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    return MuonSGD(trained, lr, momentum=optim.momentum, weight_decay=optim.weight_decay)


class MuonSGD(GroupOptimizer):
    """Parameters of four dimensions go to Muon; vectors, and all other matrices, to SGD with Nesterov momentum.

    A filter bank [out, in, kh, kw] is scaled to the norm sqrt(out) before each step, and moved by `lr` times the
    orthogonal matrix [out, in * kh * kw] nearest to its momentum: the rate is the part of it that a step replaces.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, *, momentum: float, weight_decay: float) -> None:
        params = list(params)
        kinds = {
            "filters": ([p for p in params if p.ndim == 4], lr),
            "biases": ([p for p in params if p.ndim == 1], _BIAS_LR),
            "linear": ([p for p in params if p.ndim not in (1, 4)], _HEAD_LR),
        }
        groups = [
            {"params": own, "kind": kind, "lr": rate, "decay": weight_decay / rate}
            for kind, (own, rate) in kinds.items()
            if own
        ]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    def step_group(self, group: dict[str, Any]) -> None:
        """One step of the group's algorithm."""
        move = self._move_filters if group["kind"] == "filters" else self._move
        for parameter in group["params"]:
            if parameter.grad is not None:
                move(group, parameter, parameter.grad)

    def _momentum(self, parameter: Tensor, grad: Tensor, momentum: float) -> Tensor:
        """The gradient with Nesterov momentum."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        buffer.mul_(momentum).add_(grad)
        return grad.add(buffer, alpha=momentum)

    def _move_filters(self, group: dict[str, Any], filters: Tensor, grad: Tensor) -> None:
        update = self._momentum(filters, grad, group["momentum"])
        filters.mul_(len(filters) ** 0.5 / filters.norm())
        filters.add_(orthogonal(update.flatten(1)).view(filters.shape), alpha=-group["lr"])

    def _move(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        grad = grad.add(parameter, alpha=group["decay"])
        parameter.add_(self._momentum(parameter, grad, _SGD_MOMENTUM), alpha=-group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """About the orthogonal matrix nearest to a float [m, n] one, by three Newton-Schulz steps in bfloat16."""
    a, b, c = _NEWTON_SCHULZ
    tall = len(matrix) > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x.div(x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if tall else x).to(matrix.dtype)
