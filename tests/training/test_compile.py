"""What --compile asks of torch; compiling itself takes minutes on slow machines and is torch's to test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lockstep import World
from lockstep.config import Config, DataConfig, ModelConfig
from lockstep.training.assemble import assemble
from lockstep.training.loop import train
from lockstep.watch.heartbeat import Heartbeat


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
    (tmp_path / "weights").mkdir()
    train(config, World.single(), tmp_path)
    compiled = [text for text in found if text.startswith("compilation")]
    assert compiled[:2] == ["compilation at step 0, forward-backward", "compilation at step 2, forward-backward"]
    assert len(compiled) == 3
