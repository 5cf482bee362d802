"""What --compile asks of torch; compiling itself takes minutes on slow machines and is torch's to test."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep import World
from lockstep.config import Config, DataConfig, ModelConfig
from lockstep.monitoring.heartbeat import Heartbeat
from lockstep.training.assemble import assemble
from lockstep.training.loop import train
from lockstep.training.step import TrainStep
from tests.training.test_step import batch_of


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (ModelConfig(), []),
        (ModelConfig(compile=True), [{"mode": "default"}]),
        (ModelConfig(compile=True, compile_mode="reduce-overhead"), [{"mode": "reduce-overhead"}]),
        (ModelConfig(compile_mode="max-autotune"), []),
    ],
    ids=["off", "on", "with graphs", "a mode alone"],
)
def test_the_model_is_compiled_in_the_mode_that_was_asked_for(
    model: ModelConfig, asked: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: found.append(options))
    assemble(Config(model=model), World.single())
    assert found == asked


def test_whatever_is_compiled_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step, the first short batch and the first evaluation, each once."""
    found: list[str] = []

    @contextmanager
    def long_phase(beat: Heartbeat, phase: str, longest: float = 0.0) -> Iterator[None]:
        found.append(f"{phase} at step {beat._place[0]}, {beat._place[1]}")
        yield

    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    monkeypatch.setattr(Heartbeat, "long_phase", long_phase)
    config = Config(epochs=2, batch_size=64, model=ModelConfig(compile=True), data=DataConfig(fraction=0.1))
    train(config, World.single(), tmp_path)
    compiled = [text for text in found if text.startswith("compilation")]
    assert compiled[:2] == ["compilation at step 0, forward-backward", "compilation at step 2, forward-backward"]
    assert len(compiled) == 3


class _Method(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5)


class _Around(nn.Module):
    def __init__(self, drawn: nn.Module) -> None:
        super().__init__()
        self.first, self.drawn, self.second = nn.Linear(4, 5), drawn, nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drawn(self.first(x)))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own, where it is left
@pytest.mark.parametrize(("drawn", "unkeyed"), [(_Method(), True), (nn.Dropout(), False), (nn.Identity(), False)])
def test_a_draw_that_a_compiler_took_for_its_own_is_seen(drawn: nn.Module, unkeyed: bool) -> None:
    model = _Around(drawn)
    model.compile(backend="aot_eager")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the compiler looks at torch anew
    dist.destroy_process_group()
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(2):
            step(batch_of(World.single(), torch.randn(6, 4), step=number))
    lines = [str(each.message) for each in found if "weights will differ" in str(each.message)]
    assert bool(lines) == unkeyed, lines
