"""What is read off a step: fingerprints of images and outputs, and the tensors that it leaves."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.commands.verify.trace import SAMPLES
from lockstep.parallel.sharded import whole
from lockstep.randomness import bits, stream
from lockstep.training.assemble import Run
from lockstep.watch import desync


def fingerprint(images: Tensor, labels: Tensor) -> int:
    """A number for a set of labelled images, in any order; those of its parts add up to it, modulo 2**64.

    images: [b, ...] of any type; labels: int64 [b], or soft ones [b, classes].
    """
    if not len(images):
        return 0
    sums = _digests("pixels", images)
    sums += _digests("soft label", labels) if labels.ndim > 1 else labels * (bits(stream(0, "label"), labels) | 1)
    return int(bits(stream(0, "sample"), sums).sum()) & (2**64 - 1)


def _digests(what: str, tensor: Tensor) -> Tensor:
    """int64 [b] of the bits of each row of [b, ...]."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    rows = tensor.flatten(1).contiguous().view(kind).to(torch.int64)
    factors = bits(stream(0, what), torch.arange(rows.shape[1], device=rows.device)) | 1
    return (rows * factors).sum(1)


def state(run: Run) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of all parameters, then all buffers, of the model and its moving average.

    By name and as they are now: a model may give a buffer a new tensor in each pass.
    """
    models = {"": run.model} | ({"ema.": run.ema.module} if run.ema is not None else {})
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            yield "weights", prefix + name, whole(parameter.detach())
    for prefix, model in models.items():
        for name, buffer in model.named_buffers():
            yield "buffers", prefix + name, buffer


def gradients(run: Run) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of what the optimizer is about to get."""
    for name, parameter in _owned(run):
        if parameter.grad is not None:
            yield "gradients", f"gradient of {name}", whole(parameter.grad.detach())


def moments(run: Run) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of the optimizer's own state."""
    for name, parameter in _owned(run):
        for key, value in run.step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor | int | float):
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                yield "optimizer", f"{key} of {name}", whole(tensor.detach())


def _owned(run: Run) -> Iterator[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    for g, group in enumerate(run.step.optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            yield names.get(id(parameter), f"parameter {p} of group {g}"), parameter


class Tracks:
    """Some entries, a digest and the largest magnitude of tensors by name, step after step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kinds: dict[str, str] = {}  # by name, in the order in which they came first
        self.steps: list[dict[str, tuple[int, Tensor, float]]] = []
        self.last: dict[str, Tensor] = {}  # whole tensors, of whatever was noted last

    def begin(self) -> None:
        """The next step's."""
        self.steps.append({})

    def note(self, tensors: Iterator[tuple[str, str, Tensor]], keep: bool) -> list[tuple[str, int]]:
        """Note (kind, name, tensor) of the step that began last; returns names and digests. `keep`: the rest too."""
        found = list(tensors)
        digests = desync.digests([tensor for _, _, tensor in found], self.device).tolist()
        for (kind, name, tensor), digest in zip(found, digests, strict=True):
            if keep:
                self.kinds.setdefault(name, kind)
                flat = _flat(tensor)
                places = torch.linspace(0, max(flat.numel() - 1, 0), SAMPLES).long()
                entries = flat[places] if flat.numel() else flat.new_zeros(SAMPLES)
                scale = flat.abs().max().item() if flat.numel() else 0.0
                self.steps[-1][name] = digest, entries.double(), scale
                self.last[name] = tensor.cpu().contiguous().clone()
        return [(name, digest) for (_, name, _), digest in zip(found, digests, strict=True)]

    def table(self, order: Sequence[str]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Digests [steps][names], and what a trace keeps; the last step noted is the end. 0 where there was nothing."""
        nothing = 0, torch.zeros(SAMPLES, dtype=torch.float64), 0.0
        rows = [[step.get(name, nothing) for name in order] for step in self.steps]
        kept = {f"final/{name}": self.last[name] for name in order}
        for i, name in enumerate(order):
            entries = [row[i][1] for row in rows[:-1]]
            kept[f"samples/{name}"] = torch.stack(entries) if entries else torch.zeros(0, SAMPLES)
        kept["scales"] = torch.tensor([[scale for _, _, scale in row] for row in rows], dtype=torch.float64)
        return [[digest for digest, _, _ in row] for row in rows], kept


def _flat(tensor: Tensor) -> Tensor:
    """All entries, on the host: [n], floats in float64."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().cpu().reshape(-1).to(torch.float64)


class Watch:
    """A forward hook on the whole model: the fingerprint of its outputs in training."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Note one pass."""
        del args
        if module.training and isinstance(outputs, Tensor):
            rows = outputs.detach()
            self.seen.append(fingerprint(rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device)))

    def __deepcopy__(self, memo: Any) -> "Watch":
        return self

    def taken(self) -> int:
        """The fingerprint of all outputs since the last call."""
        seen, self.seen = self.seen, []
        return sum(seen) & (2**64 - 1)
