"""What the parameters of the user's models are called, and which wrappers there are."""

import weakref

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
names: dict[int, str] = {}  # by id of the parameter, without the wrappers' prefixes
models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_modal: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_with_parameters: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def bare(module: nn.Module) -> nn.Module:
    """The model in DDP or DataParallel."""
    while isinstance(module, DistributedDataParallel | DataParallel):
        module = module.module
    return module


def has_parameters(module: nn.Module) -> bool:
    """Whether a module holds weights: losses and transforms don't."""
    found = _with_parameters.get(module)
    if not found:
        found = _with_parameters[module] = next(module.parameters(), None) is not None
    return found


def is_wrapped(module: nn.Module) -> bool:
    """Whether a module is a wrapper, or the model in one."""
    return bare(module) is not module or any(wrapper.module is module for wrapper in wrappers)


def changes_with_mode(module: nn.Module) -> bool:
    """Whether training and evaluation mode differ: by dropout, or by batch norm."""
    if module not in _modal:
        _modal[module] = any(
            isinstance(each, nn.modules.batchnorm._BatchNorm) or (isinstance(each, _DROPOUTS) and each.p > 0)
            for each in module.modules()
        )
    return _modal[module]


def devices(module: nn.Module) -> list[str]:
    """Where the parameters are."""
    return sorted({str(each.device) for each in module.parameters()})


def learn(module: nn.Module) -> None:
    """Remember the names of a model's parameters."""
    model = bare(module)
    if model in models:
        return
    models.add(model)
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)


def name_of(parameter: torch.Tensor, place: int) -> str:
    """A parameter's name in its model, or its place in the optimizer."""
    return names.get(id(parameter), f"parameter {place}")


def synchronises() -> bool:
    """Whether a backward pass now would all-reduce: false inside no_sync."""
    return all(bool(wrapper.require_backward_grad_sync) for wrapper in wrappers)
