"""Optimizers by name: torch's own, and Muon with AdamW for the parameters that Muon does not take."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import OptimConfig
from lockstep.config.objects import load_object
from lockstep.errors import UserError
from lockstep.models.cifar10_speed import MuonSGD
from lockstep.parallel.sharded import is_part
from lockstep.training import timm_parts
from lockstep.training.groups import groups


def build(model: nn.Module, optim: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """The optimizer of a run over the model's trainable parameters, with peak learning rate `lr`.

    A user's factory is called as factory(model, optim, lr). Each group holds `initial_lr`, which schedules multiply:
    its own rate as it was made. On a GPU, SGD, Adam and AdamW run as one fused kernel.

    Raises:
        UserError: where no parameter requires a gradient, or a factory returns no optimizer.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError(
            f"{type(model).__name__} has no parameter to train",
            "Every parameter has requires_grad=False: unfreeze some, or name another --model.",
        )
    fused, made = _have_kernels(parameters), groups(model, optim, lr)
    decay, momentum = optim.weight_decay, optim.momentum
    optimizer: torch.optim.Optimizer
    match optim.optimizer:
        case "sgd":
            optimizer = torch.optim.SGD(
                made,
                lr,
                momentum=momentum,
                weight_decay=decay,
                nesterov=optim.nesterov,
                fused=fused and not any(map(is_part, parameters)),  # its kernel alone takes no DTensor
            )
        case "adam":
            optimizer = torch.optim.Adam(made, lr, weight_decay=decay, fused=fused)
        case "adamw":
            optimizer = torch.optim.AdamW(made, lr, weight_decay=decay, fused=fused)
        case "adadelta":
            optimizer = torch.optim.Adadelta(made, lr, weight_decay=decay)
        case "muon":
            optimizer = MuonAdamW(made, lr, momentum=momentum, weight_decay=decay, fused=fused)
        case "muon-sgd":
            optimizer = MuonSGD(parameters, lr, momentum=momentum, weight_decay=decay)
        case name if name.startswith(timm_parts.PREFIX):
            optimizer = timm_parts.optimizer(optim, made, lr)
        case path:
            optimizer = _from_factory(path, model, optim, lr)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _from_factory(path: str, model: nn.Module, optim: OptimConfig, lr: float) -> torch.optim.Optimizer:
    factory = load_object(path, "optimizer")
    remedy = "The factory gets (model, optim, lr) and returns a torch.optim.Optimizer."
    if isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer):
        raise UserError(f"optimizer {path} is an optimizer's class, not a factory", remedy)
    try:
        inspect.signature(factory).bind(model, optim, lr)
    except (TypeError, ValueError) as error:  # its own TypeErrors pass through, with their traceback
        raise UserError(f"optimizer {path} can't be called with (model, optim, lr): {error}", remedy) from error
    optimizer = factory(model, optim, lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer {path} returned a {type(optimizer).__name__}, not a torch optimizer", remedy)
    return optimizer


def _have_kernels(parameters: Iterable[Tensor]) -> bool:
    """True where fused kernels are worth having: on cuda, xpu and mps."""
    return all(parameter.device.type != "cpu" for parameter in parameters)


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for matrices and convolutions, torch's AdamW for all else, as one optimizer with one learning rate.

    Muon takes 2-D parameters only: a convolution [out, in, kh, kw] reaches it as a view [out, in * kh * kw] of the same
    memory. Parameters whose view would be one row or column (biases, norms, class tokens, layer scales) are AdamW's.
    Muon's rate is adjusted so that its updates have the size of AdamW's ("match_rms_adamw": Liu et al., "Muon is
    scalable for LLM training", 2025). State has its parameter's shape, so it does not depend on the memory format.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, *, momentum: float, weight_decay: float, fused: bool = False
    ) -> None:
        params = list(params)
        given = params if isinstance(next(iter(params), None), dict) else [{"params": params}]
        # The parts hold no parameters of their own: each step hands them this step's groups, views and state.
        blank = torch.zeros(1, 1)
        self._muon = torch.optim.Muon(
            [blank], lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW([blank], lr, weight_decay=weight_decay, fused=fused)
        made = [
            {**part.param_groups[0], **group, "params": own, "algorithm": name}
            for name, part in (("muon", self._muon), ("adamw", self._adamw))
            for group in given
            if (own := [p for p in group["params"] if _is_matrix(p) == (name == "muon")])
        ]
        super().__init__(made, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each group by its own algorithm."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._step_muon(group)
            else:
                self._adamw.state, self._adamw.param_groups = self.state, [group]
                self._adamw.step()
        return loss

    def _step_muon(self, group: dict[str, Any]) -> None:
        views = []
        self._muon.state.clear()
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = torch.zeros_like(parameter)
            elif buffer.stride() != parameter.stride():  # loaded, or the memory format changed
                buffer = torch.empty_like(parameter).copy_(buffer)
            state["momentum_buffer"] = buffer
            order = _dim_order(parameter)
            view = _as_matrix(parameter.detach(), order)
            view.grad = parameter.grad.permute(order).reshape(view.shape)  # read only, so a copy does no harm
            self._muon.state[view] = {"momentum_buffer": _as_matrix(buffer, order)}
            views.append(view)
        self._muon.param_groups = [{**group, "params": views}]
        self._muon.step()  # type: ignore[no-untyped-call]


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and parameter.shape[0] > 1 and parameter[0].numel() > 1


def _dim_order(parameter: Tensor) -> list[int]:
    """Dimension 0, then the others by falling stride: the order in which they fuse without a copy."""
    strides = parameter.stride()
    return [0, *sorted(range(1, parameter.ndim), key=lambda dim: (-strides[dim], dim))]


def _as_matrix(tensor: Tensor, order: list[int]) -> Tensor:
    """The tensor as [dim 0, the rest], sharing its memory; `view` raises where that needs a copy."""
    return tensor.permute(order).view(tensor.shape[0], -1)
