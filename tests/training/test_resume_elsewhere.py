"""A run that goes on from another run's checkpoint, or without a file it began with: what it leaves can be used."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lockstep.checkpoint import weights
from lockstep.checkpoint.foreign import load_foreign
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, Recovery
from lockstep.config.fields import with_values
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.models import build
from lockstep.training.loop import train
from lockstep.training.run_folder import claim_folder

BASE = Config(
    batch_size=48,
    epochs=3,
    data=DataConfig(dataset="digits", fraction=0.1),  # 144 samples: 3 steps an epoch
    model=ModelConfig(model="mlp"),
    optim=OptimConfig(lr=0.05),
    execution=Execution(eval_batch_size=360),
    recovery=Recovery(checkpoint_every="3steps", keep=9),
)


def trained(out: Path, **values: Any) -> Path:
    """The folder of a run with these values of flags."""
    config = with_values(BASE, {"out": str(out), **values})
    folder = claim_folder(config)
    train(config, World.single(), folder)
    return folder


def kept(folder: Path, name: str) -> tuple[bytes, dict[str, str]]:
    path = folder / "weights" / f"{name}.safetensors"
    with safe_open(path, framework="pt") as file:
        return path.read_bytes(), file.metadata()


def test_the_best_weights_come_along_from_another_run(tmp_path: Path) -> None:
    # a rate so high at the end that the first epochs stay the best
    worse = {"optimizer": "sgd", "lr": 0.05, "schedule": "multistep", "milestones": (2.0,), "gamma": 4000.0}
    straight = trained(tmp_path / "straight", **worse)
    bytes_of, note = kept(straight, "best")
    assert int(note["step"]) < 9, "the last epoch was meant to be worse than one before"
    source = next((straight / "checkpoints").glob("step-*6"))
    again = trained(tmp_path / "again", **worse, resume=str(source))
    assert kept(again, "best") == (bytes_of, note)
    # without the other run's file the best is the best of what this run has seen
    (straight / "weights" / "best.safetensors").unlink()
    alone = trained(tmp_path / "alone", **worse, resume=str(source))
    assert kept(alone, "best")[1]["step"] == "9"


def test_a_checkpoint_named_is_obeyed_or_refused(tmp_path: Path) -> None:
    first = trained(tmp_path / "first", epochs=1)
    with pytest.raises(UserError, match="no checkpoint there"):
        trained(tmp_path / "x", resume=str(tmp_path / "nowhere"))
    going = {"resume": str(first), "override": ("epochs",)}
    assert kept(trained(tmp_path / "going", **going), "final")[1]["step"] == "9"
    trained(tmp_path / "going", **going)  # again, as a scheduler gives it: the run's own checkpoints go before
    for source in (first, next((first / "checkpoints").glob("step-*3")), tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"first holds checkpoints of its own"):
            trained(first, epochs=1, resume=str(source))
    copied = tmp_path / "copied"
    shutil.copytree(next((first / "checkpoints").glob("step-*3")), copied)
    with pytest.raises(UserError, match="is no good checkpoint: it holds step 3"):
        trained(tmp_path / "y", resume=str(copied))
    with pytest.raises(UserError, match="3 epochs are behind it, and --epochs is 1"):
        trained(tmp_path / "going", epochs=1, **going)


def test_the_file_that_a_run_began_with_may_be_gone_when_it_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(5)
    initial = tmp_path / "initial.safetensors"
    weights.save(build("mlp", in_channels=1, num_classes=10, image_size=8), initial, {})
    assert trained(tmp_path / "run", init=str(initial), epochs=1) == tmp_path / "run"
    initial.unlink()
    more = trained(tmp_path / "run", init=str(initial), epochs=3, override=("epochs",))
    assert kept(more, "final")[1]["step"] == "9"
    with pytest.raises(UserError, match="no weights at"):
        trained(tmp_path / "new", init=str(initial), epochs=1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.to(torch.int32), "int32 -> "),
        (lambda t: torch.full_like(t, torch.nan), "not finite"),
        (lambda t: torch.full_like(t, torch.inf), "not finite"),
    ],
)
def test_weights_that_are_none_are_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    model = build("mlp", in_channels=1, num_classes=10, image_size=8)
    state = model.state_dict()
    name = next(iter(state))
    torch.save({**state, name: spoil(state[name])}, tmp_path / "spoiled.pt")
    with pytest.raises(UserError, match=f"{name}.*{said}|{said}.*{name}"):
        load_foreign(model, tmp_path / "spoiled.pt")


def test_batch_norms_count_of_batches_may_be_missing_as_in_torch(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    state = {name: value + 1 for name, value in model.state_dict().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "old.pt")
    load_foreign(model, tmp_path / "old.pt")
    loaded = model.state_dict()
    assert torch.equal(loaded["1.weight"], state["1.weight"])
    assert int(loaded["1.num_batches_tracked"]) == 0
