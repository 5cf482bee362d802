"""Before the first step: does what the model computes for a sample depend on which others pass with it?

Five samples go through a copy of the model in float64, forward and backward, under the keys of a step: whole, and cut
into (0, 2, 4) and (1, 3), each cut part through a fresh copy, as on two ranks. Interleaved, because a plain cut would
not show statistics over pairs. Batch norms are in evaluation mode: what they do is said elsewhere. In exact mode parts
are the same for every N, so there the question is another one: does a part depend on the one before it in the process?

It costs two or three forward and backward passes of five samples, a copy of the weights in float64, and no trace.
"""

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pickle import PickleError
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.data.augment import Augment
from lockstep.draws.intercept import keyed
from lockstep.draws.keyed import Draws, Recorder, current
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import batch_norms
from lockstep.parallel.sharded import is_sharded
from lockstep.parallel.untouched import same_generators
from lockstep.processes.world import World
from lockstep.training.assemble import Run, build_model
from lockstep.training.passes import FIRST, ROUNDING, SECOND, WHOLE, Call, Pass, apart, differ, largest, mean, place

_SEED = 1  # fixed: with some, as 0, a permutation of five changes nothing
_LONG_S = 5.0  # worth a line


def probe(config: Config, world: World, run: Run) -> list[str]:
    """Lines that name what in a model depends on the number of processes; empty where nothing does, as a rule.

    Rank 0 looks, the others go on to where they wait for it. Of a sharded model it builds a whole one on the host.

    Raises:
        UserError: in exact mode, whose promise it would break.
    """
    asked = config.execution.probe and (world.size > 1 or config.exact or config.execution.strategy == "dp")
    if not asked or world.rank:
        return []
    began = time.monotonic()
    world.status("starting: looking for parts of the model that depend on --nproc")
    try:
        with same_generators({p.device for p in run.model.parameters()}), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training will say them
            looking = _Probe(run, config)
            found = looking.found()
            if run.step.draws is not None and looking.model is run.model:  # FSDP's passes need all ranks
                run.step.draws.plan = run.step.draws.plan or looking.draws.plan  # it is the same one
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, PickleError) as error:
        first = (str(error).splitlines() or [""])[0]
        return [f"note: nobody looked for what depends on the number of processes: {type(error).__name__}: {first}"]
    took = time.monotonic() - began
    lines = [f"looked for what depends on the number of processes in {took:.0f} s"] if took > _LONG_S else []
    if found and config.exact:
        raise UserError(
            f"--exact {config.exact}: what {found} for a slice depends on the slices before it in the same process",
            "Keep no state over passes in Python attributes or in generators of the model's own; --no-probe trains "
            "all the same.",
        )
    if found:
        lines.append(
            f"note: what {found} for a sample depends on which others pass with it, and so on --nproc: it looks at its "
            "whole batch, or draws numbers that are not keyed by sample. --no-probe looks no more"
        )
    return lines


class _Probe:
    def __init__(self, run: Run, config: Config) -> None:
        self.model, self.draws, self.exact = run.model, Draws(_SEED), config.exact
        if is_sharded(run.model):
            begun = replace(config, model=replace(config.model, init=""))  # the file may be gone
            self.model = build_model(begun, run.train.images)
        ids = np.arange(len(WHOLE)) % len(run.train.images)
        pixels, _ = run.train.images.read(ids, None)
        plain = Augment(run.train.images.mean, run.train.images.std, image_size=config.data.train_side)
        device = next(self.model.parameters()).device
        self.images = plain(pixels, torch.from_numpy(ids), None).to(device, torch.float64)  # [5, C, H, W]

    def found(self) -> str:
        """What differs, as "layer (Class) computes"; empty if nothing does."""
        if self.exact:
            alone = self.passed(self.fresh(), SECOND, 1)
            model = self.fresh()
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            self.passed(model, FIRST, 0)
            with torch.no_grad():
                for name, buffer in model.named_buffers():  # as every slice starts from the step's
                    if name in buffers:
                        buffer.detach().copy_(buffers[name])
            return self.compared(alone, [self.passed(model, SECOND, 1)], lambda parts: parts[0], lambda parts: parts[0])
        whole = self.passed(self.fresh(), WHOLE, 0)
        parts = [self.passed(self.fresh(), rows, key) for key, rows in enumerate((FIRST, SECOND))]
        return self.compared(whole, parts, lambda two: two[0] + two[1], mean)

    def fresh(self) -> nn.Module:
        """A copy in float64, its batch norms in evaluation mode."""
        model = copy.deepcopy(self.model).double()
        for layer in batch_norms(model):
            layer.training = False
        return model

    def passed(self, model: nn.Module, rows: Sequence[int], key: int) -> Pass:
        """Forward and backward of some of the samples, every generator seeded for the piece."""
        taken, hooks = Pass(), []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_hook(partial(_note, taken.calls, name)))
        torch.manual_seed(key)
        np.random.seed(0)
        random.seed(0)
        ids, images = np.array(rows), self.images[list(rows)]
        for parameter in model.parameters():
            parameter.grad = None
        with keyed(self.draws, model, 0, ids, images):
            output: Tensor = model(images)
            along = torch.linspace(-1, 1, output[0].numel() * len(WHOLE), dtype=torch.float64, device=output.device)
            (output * along.sin().view(len(WHOLE), *output.shape[1:])[list(rows)]).sum().backward()  # type: ignore[no-untyped-call]
        for hook in hooks:
            hook.remove()
        taken.output = output.detach()
        taken.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        taken.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        return taken

    def compared(
        self,
        whole: Pass,
        parts: Sequence[Pass],
        add: Callable[[Sequence[Tensor]], Tensor],
        average: Callable[[Sequence[Tensor]], Tensor],
    ) -> str:
        """The place of the first difference between one pass and others that should come to the same."""
        if differ([whole.output], [[part.output] for part in parts]):
            return f"{self.called(place(whole, parts))} computes"
        least = ROUNDING * largest(whole.gradients.values())
        for name, gradient in whole.gradients.items():
            theirs = [part.gradients[name] for part in parts if name in part.gradients]
            if len(theirs) < len(parts) or apart(gradient, add(theirs), least):
                return f"{self.called(name.rpartition('.')[0])} gets as a gradient"
        for name, buffer in whole.buffers.items():
            theirs = [part.buffers[name] for part in parts if name in part.buffers]
            same = len(theirs) == len(parts) and all(t.shape == buffer.shape for t in theirs)
            if not same or apart(buffer, average(theirs)):
                return f"{self.called(name.rpartition('.')[0])} keeps in {name.rpartition('.')[2]}"
        return ""

    def called(self, name: str) -> str:
        module = self.model.get_submodule(name)
        return f"{name or 'the model'} ({type(module).__name__})"


def _note(calls: list[Call], name: str, module: nn.Module, args: Any, output: Any) -> None:
    if not isinstance(current(), Recorder):  # else it is one of the passes that find where the batch is
        calls.append((name, _copies(args), _copies(output)))
    del module


def _copies(value: Any) -> list[Tensor]:
    """The floating-point tensors of a module's inputs or outputs; copies, since the next module may work in place."""
    return [t.detach().clone() for t in _tensors(value) if t.is_floating_point()]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
