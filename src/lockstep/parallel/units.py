"""The parts of a model that are used as a whole: what FSDP gathers at a time, and between which a model can be cut."""

from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGE = 1_000_000  # parameters: a single layer of this size is worth a gathering of its own


def units(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: what its Sequentials and ModuleLists hold, except small single layers.

    Of a ResNet its residual blocks, of a vision transformer its encoder layers, of a VGG its large linear layers. What
    is in no unit belongs to the model itself. No unit is inside another one.
    """
    return list(dict.fromkeys(_units(model)))


def _units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        block = next(child.children(), None) is not None
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS) and (block or _size(child) >= _LARGE):
            if _size(child):
                yield child
        else:
            yield from _units(child)


def sequence(model: nn.Module) -> list[nn.Module]:
    """The model in parts that may lie on different devices: units, the layers beside them, no part inside another.

    A module that holds units somewhere inside (a transformer's encoder, say) is taken apart, as the model itself is; a
    unit is not, since its forward may add what comes in to what goes out.
    """
    parts = [part for child in model.children() for part in _parts(child, isinstance(model, _CONTAINERS))]
    return list(dict.fromkeys(parts)) or [model]


def _parts(module: nn.Module, is_element: bool) -> list[nn.Module]:
    if not isinstance(module, _CONTAINERS) and (is_element or not units(module)):
        return [module]
    return sequence(module)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
