"""What the parameters of the user's models are called, and which wrappers there are."""

import weakref

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPERS = DistributedDataParallel, DataParallel, FullyShardedDataParallel
_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
names: dict[int, str] = {}  # by id of the parameter, without the wrappers' prefixes
models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
# by wrapper of FSDP's: over how many ranks it has cut its weights, 0: not known; fully_shard's tensors tell themselves
parts: list[int] = []
passes_begun = [0]  # over loaders, in this process
_modal: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
_with_parameters: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def bare(module: nn.Module) -> nn.Module:
    """The model in DDP, DataParallel or FSDP, and in what Fabric and torch.compile put around those."""
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def wrapper_of(module: nn.Module) -> str:
    """The class of the wrapper that a module is or has around the model; "" for none."""
    while (inner := _inside(module)) is not None:
        if isinstance(module, _WRAPPERS):
            return type(module).__name__
        module = inner
    return ""


def _inside(module: nn.Module) -> nn.Module | None:
    if isinstance(module, _WRAPPERS):
        return module.module
    held = next((child for name, child in module.named_children() if name in ("_forward_module", "_orig_mod")), None)
    return held if held is not None and held is not module else None


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
    """Where the parameters are; of shards nobody here knows."""
    whole = (each for each in module.parameters() if type(each) is nn.Parameter)
    return [] if parts else sorted({str(each.device) for each in whole})


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
