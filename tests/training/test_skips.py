"""`--on-nonfinite skip` over a whole run: what is left out is recorded, counted and moves nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery
from lockstep.distributed.world import World
from lockstep.monitoring.journal import read
from lockstep.training.loop import train

EPOCHS, SAMPLES, BATCH = 2, 40, 10


def poisoned() -> Any:
    """Float images of which one is infinite."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(SAMPLES, 1, 8, 8, generator=generator), torch.arange(SAMPLES) % 10
    bad = images.clone()
    bad[7] = torch.inf
    return (bad, labels), (images, labels)


def test_a_step_that_is_left_out_is_recorded_and_moves_no_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(
        epochs=EPOCHS,
        batch_size=BATCH,
        on_nonfinite="skip",
        data=DataConfig(dataset=f"{__name__}:poisoned"),
        model=ModelConfig(model="mlp"),
        optim=OptimConfig(lr=0.0125, ema=0.5),
        execution=Execution(device="cpu", threads=1, loader="resident"),
        recovery=Recovery(checkpoint_every="0"),
    )
    outcome = train(config, World.single(), tmp_path)
    records: list[Any] = list(read(tmp_path / "journal.jsonl"))
    left_out = [record["step"] for record in records if record["kind"] == "fault"]
    assert [step // (SAMPLES // BATCH) for step in left_out] == [0, 1], "the bad sample comes once an epoch"
    assert records[-1]["skipped"] == EPOCHS
    assert outcome.state.samples == EPOCHS * (SAMPLES - BATCH), "what was left out was not trained on"
    assert all(bool(torch.isfinite(t).all()) for t in load_file(tmp_path / "weights" / "final.safetensors").values())
    assert f"{EPOCHS} step(s) left out, whose gradients were not finite" in capsys.readouterr().out
