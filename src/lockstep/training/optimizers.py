"""Optimizers by name, and their groups: rates by layer, weight decay by parameter.

Groups are functions of the config and of the model's names and shapes, so they are the same on any number of processes.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import OptimConfig
from lockstep.config.objects import load_object
from lockstep.errors import UserError, unknown, with_article
from lockstep.models.cifar10_speed import MuonSGD
from lockstep.parallel.fsdp import is_part, units

# of transformers that don't say by `no_weight_decay`, as timm's do, what isn't to be decayed
_TOKENS = ("class_token", "cls_token", "dist_token", "pos_embed", "pos_embedding", "relative_position_bias_table")


def groups(model: nn.Module, optim: OptimConfig, lr: float) -> list[dict[str, Any]]:
    """Groups of the trainable parameters, each with its rate and decay; those whose rate is nearest to `lr` come first.

    `--layer-decay d` gives a layer the rate lr * d ** (its distance from the head, in blocks: `depths`), as in Bao et
    al., "BEiT", 2022, and in timm.
    """
    depth, _ = depths(model) if optim.layer_decay < 1 else (dict[str, int](), "")
    heads, top, own = head(model), max(depth.values(), default=0), spared(model, optim)
    found: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = lr * optim.layer_decay ** (top - depth.get(name, top))
            if optim.head_lr and name in heads:
                rate = optim.head_lr * lr / optim.lr  # --scale-lr is for both
            decay = 0.0 if name in own else optim.weight_decay
            found.setdefault((rate, decay), []).append(parameter)
    made = [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in found.items()]
    return sorted(made, key=lambda group: abs(group["lr"] - lr))


def spared(model: nn.Module, optim: OptimConfig) -> set[str]:
    """The names of the parameters that weight decay leaves alone: norms, biases, and what timm's models name."""
    if not optim.weight_decay or not optim.spares_norms:
        return set()
    theirs = getattr(model, "no_weight_decay", None)
    names = set(theirs()) if callable(theirs) else set()
    return {
        name
        for name, p in model.named_parameters()
        if p.ndim <= 1
        or name in names
        or name.endswith(".bias")
        or (not callable(theirs) and name.rpartition(".")[2] in _TOKENS)
    }


def head(model: nn.Module) -> set[str]:
    """The names of the last layer's parameters: timm's classifier, or the last module that has parameters."""
    asked = getattr(model, "get_classifier", None)
    last = asked() if callable(asked) else None
    ends = last if isinstance(last, list | tuple) else [last]
    wanted = {id(p) for end in ends if isinstance(end, nn.Module) for p in end.parameters()}
    if not wanted:
        holding = [module for module in model.modules() if list(module.parameters(recurse=False))]
        wanted = {id(p) for p in holding[-1].parameters(recurse=False)} if holding else set()
    return {name for name, p in model.named_parameters() if id(p) in wanted}


def depths(model: nn.Module) -> tuple[dict[str, int], str]:
    """Each parameter's depth, 0 at the input, and by what it was decided.

    timm's models say it themselves (`group_matcher`). Of others the blocks count (`units`: a ResNet's residual blocks,
    a transformer's layers), or the layers where most parameters lie in no block. The head is the deepest; what stands
    between blocks goes with the one before it.
    """
    matcher = getattr(model, "group_matcher", None)
    if callable(matcher):
        from timm.models import group_parameters

        theirs: Mapping[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        return dict(theirs), "timm's group_matcher"
    blocks, how = units(model), "blocks"
    names = [name for name, _ in model.named_parameters()]
    if 2 * sum(len(list(block.parameters())) for block in blocks) <= len(names):
        holding = [module for module in model.modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))]
        blocks, how = holding[1:], "layers"  # no norms; the first one is the stem
    heads = head(model)
    number = {id(p): k for k, block in enumerate(blocks, 1) for p in block.parameters()}
    found, here = dict[str, int](), 0
    for name, parameter in model.named_parameters():
        if name not in heads:
            here = number.get(id(parameter), here)
            found[name] = here
    return found | dict.fromkeys(heads, max(found.values(), default=-1) + 1), how


def lines(model: nn.Module, optim: OptimConfig, lr: float) -> list[str]:
    """What of it is not to be taken for granted, for the start of a run."""
    found = []
    if optim.layer_decay < 1:
        by_name, how = depths(model)
        deep = sorted({by_name[name] for name, p in model.named_parameters() if p.requires_grad and name in by_name})
        least = lr * optim.layer_decay ** (max(by_name.values()) - deep[0])
        found.append(
            f"layer decay {optim.layer_decay:g} over {len(set(by_name.values()))} depths, by {how}: "
            f"rates {least:.3g} to {lr:.3g}"
        )
    if optim.head_lr:
        found.append(f"the head ({', '.join(sorted(head(model)))}) has the rate {optim.head_lr * lr / optim.lr:.3g}")
    if own := spared(model, optim):
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        count = len(own.intersection(trained))
        found.append(
            f"weight decay {optim.weight_decay:g} leaves {count} of {len(trained)} parameters alone, norms and biases "
            "(--decay-norms yes: none)"
        )
    return found


PREFIX = "timm:"
# these want a backward pass of their own, kernels of other packages, or a generator that no checkpoint holds
_LEFT_OUT = ("adahessian", "bnb", "fused", "kron")


def is_factory(optimizer: str) -> bool:
    """True for a name of the form package.module:factory."""
    return ":" in optimizer and not optimizer.startswith(PREFIX)


def require_timm(optim: OptimConfig) -> None:
    """Raise UserError where timm or what it is asked for is not there."""
    if not optim.optimizer.startswith(PREFIX):
        return
    if importlib.util.find_spec("timm") is None:
        raise UserError(f"--optimizer {optim.optimizer}: timm is not installed", "pip install 'lockstep-torch[timm]'")
    listed = importlib.import_module("timm.optim").list_optimizers()
    known = [name for name in map(str, listed) if not name.startswith(_LEFT_OUT)]
    if (name := optim.optimizer.removeprefix(PREFIX)) not in known:
        remedy = "--optimizer timm:NAME takes those that need nothing but torch."
        raise unknown("optimizer of timm", name, known, remedy)


def timm_optimizer(optim: OptimConfig, parameters: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    """timm's optimizer over parameters or groups of them; --momentum reaches those that have one."""
    require_timm(optim)
    create = importlib.import_module("timm.optim").create_optimizer_v2
    name = optim.optimizer.removeprefix(PREFIX)
    made: torch.optim.Optimizer = create(
        list(parameters), name, lr=lr, weight_decay=optim.weight_decay, momentum=optim.momentum
    )
    return made


def build(model: nn.Module, optim: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """The optimizer of a run over the model's trainable parameters, with peak learning rate `lr`.

    A user's factory is called as factory(model, optim, lr). Each group holds `initial_lr`, which schedules multiply:
    its own rate as it was made. On a GPU, SGD, Adam and AdamW run as one fused kernel.

    Raises:
        UserError: where a factory returns no optimizer. (Where nothing is trained `require_trainable` has said so.)
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
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
        case "muon-sgd":
            optimizer = MuonSGD(parameters, lr, momentum=momentum, weight_decay=decay)
        case name if name.startswith(PREFIX):
            optimizer = timm_optimizer(optim, made, lr)
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
        raise UserError(f"optimizer {path} returned {with_article(optimizer)}, not a torch optimizer", remedy)
    return optimizer


def _have_kernels(parameters: Iterable[Tensor]) -> bool:
    """True where fused kernels are worth having: on cuda and xpu."""
    return all(parameter.device.type != "cpu" for parameter in parameters)
