"""What --compile asks of torch; compiling itself takes minutes on slow machines and is torch's to test."""

from typing import Any

import pytest
from torch import nn

from lockstep import World
from lockstep.config import Config, ModelConfig
from lockstep.training.assemble import assemble


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
