"""A model as it was before: passes that are only looked at work on copies of what they could change."""

import copy
import random
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque)
_STRUCTURE = {"_parameters", "_modules"}  # of a module: FSDP swaps parameters there, and knows which it has put in


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Within, forward passes may do to the model what they like: all is as before afterwards.

    Every module has copies of its buffers, of other tensors that are its attributes, and of its lists, dicts, sets and
    deques, one level deep; afterwards the attributes are what they were. The originals are not written to, so this
    works in the middle of a forward pass too. Parameters are the model's own. The generators of torch, numpy and
    Python and the filters of warnings are put back. Costs a copy of the buffers.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(same_generators({p.device for p in model.parameters()}))
        copies: dict[int, Any] = {}  # what two modules share, their copies share
        for module in model.modules():
            stack.callback(_put_back, module, dict(module.__dict__))
        for module in model.modules():
            attributes = module.__dict__
            attributes.update({k: _copied(value, copies) for k, value in attributes.items() if k not in _STRUCTURE})
            attributes["_buffers"].update({name: _copied(b, copies) for name, b in attributes["_buffers"].items()})
        yield


def _put_back(module: nn.Module, attributes: dict[str, Any]) -> None:
    module.__dict__.clear()
    module.__dict__.update(attributes)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return copies.setdefault(id(value), value.detach().clone())
    return copies.setdefault(id(value), copy.copy(value)) if type(value) in _CONTAINERS else value


@contextmanager
def same_generators(devices: set[torch.device]) -> Iterator[None]:
    """Put the generators of torch (the host's and those of `devices`), numpy and Python back afterwards."""
    python, numpys = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        for kind in {device.type for device in devices} - {"cpu", "meta"}:
            indices = [device.index for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(indices, device_type=kind))
        host = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(host)
            random.setstate(python)
            np.random.set_state(numpys)
