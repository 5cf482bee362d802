"""`lockstep reproduce`: a script's experiment as a recipe, and the proof that it is that one."""

import json
import socket
import sys
from pathlib import Path

import pytest

from lockstep.commands.reproduce.recipe import _pixels
from lockstep.commands.reproduce.settings import Reproduce
from lockstep.commands.reproduce.source import excerpt
from lockstep.commands.shared.arguments import script_among
from lockstep.config.recipes import recipe
from lockstep.config.toml import applied, read_values
from tests.reproduce import scripts
from tests.subprocesses import Command, run_lockstep

SCRIPT = """
from __future__ import annotations
import os, math
from a import b as c, d

args = parse()
SIZE = args.size
LATER = compute()


def twice(x):
    return 2 * x


@c
class Net:
    size = twice(SIZE)

    def f(self):
        return math.pi, LATER


class Other:
    pass


if __name__ == "__main__":
    Net()
"""


def reproduced(folder: Path, text: str, *flags: str, args: tuple[str, ...] = ()) -> tuple[str, dict[str, list[float]]]:
    """What is said of a script, and the losses of the proof."""
    (folder / "script.py").write_text(text)
    ended = run_lockstep("reproduce", "--out", "out", *flags, "script.py", *args, cwd=folder, timeout=300)
    assert ended.code == 0, ended.text
    proof = json.loads((folder / "out" / "proof.json").read_text())
    return ended.out, {"script": proof[-1]["script"], **proof[-1]["lockstep"]}


def agree(losses: dict[str, list[float]], count: int) -> None:
    for name, values in losses.items():
        assert len(values) == count, name
        assert values == pytest.approx(losses["script"], rel=1e-5), name
    assert len(set(losses["script"])) == count, "the losses would agree if nothing moved"


@pytest.mark.slow
def test_a_plain_script_with_dropout_and_stairs(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, scripts.PLAIN, "--steps", "4", "--compare", "1")
    agree(losses, 4)
    assert "losses: equal until rounding over 4 steps" in said
    assert "first weights: equal" in said
    assert "images as the recipe reads them: equal" in said
    config = applied(read_values(str(tmp_path / "out" / "recipe.toml")), recipe("digits"), "recipe.toml")
    optim = config.optim
    assert (config.epochs, config.batch_size, config.seed) == (6, 16, 3)
    assert (optim.optimizer, optim.lr, optim.momentum, optim.weight_decay) == ("sgd", 0.1, 0.9, 1e-4)
    assert (optim.schedule, optim.step_epochs, optim.gamma) == ("step", 2.0, 0.5)
    parts = (tmp_path / "out" / "parts.py").read_text()
    assert "WIDTH = 4" in parts
    assert "DataLoader(" not in parts


def test_flags_stand_before_the_script() -> None:
    assert script_among(["--steps", "3", "train.py", "--steps", "5"], Reproduce) == (
        ["--steps", "3"],
        "train.py",
        ["--steps", "5"],
    )
    assert script_among(["train.py", "3"], Reproduce) == ([], "train.py", ["3"])
    assert script_among(["--steps=3", "train.py"], Reproduce) == (["--steps=3"], "train.py", [])
    assert script_among(["--help"], Reproduce) == (["--help"], "", [])


def test_a_script_that_trains_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('nothing here')\n")
    ended = run_lockstep("reproduce", "script.py", cwd=tmp_path, timeout=300)
    assert ended.code == 2, ended.text
    assert "took no step that could be recorded" in ended.err
    assert "nothing here" in ended.err
    assert not (tmp_path / "script-lockstep").exists()


@pytest.mark.slow
def test_ranks_with_faults_that_are_replayed_and_not_copied(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, scripts.RANKS, "--nproc", "2", "--steps", "4")
    agree(losses, 4)
    assert set(losses) == {"script", "1", "2"}
    for part in (
        "40 samples a step of 240, 4 epochs",
        "LS101 line",
        "LS104 line 50: a rank's part of the test set is taken for the whole (a rank evaluated 45 of 90 samples)",
        "(gradients are 2 times those of the mean)",
        "--batch-norm groups:10",
        "learning rates of all epochs: equal",
    ):
        assert part in said, said
    config = applied(read_values(str(tmp_path / "out" / "recipe.toml")), recipe("digits"), "recipe.toml")
    assert (config.batch_size, config.accumulate, config.optim.clip_norm) == (40, 2, 2.0)
    parts = (tmp_path / "out" / "parts.py").read_text()
    assert 'model._modules["4"] = torch.nn.Linear(128, 5)' in parts
    assert "torch.optim.RMSprop(model.parameters(), lr=lr, alpha=0.9)" in parts
    ended = Command(sys.executable, "train.py", cwd=tmp_path / "out").end(300)
    assert ended.code == 0, ended.text
    assert "epoch 4: top-1" in ended.out


@pytest.mark.slow
def test_spawned_on_gpus_that_are_pretended(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    said, losses = reproduced(tmp_path, scripts.SPAWNED, "--steps", "5", args=(port,))
    agree(losses, 5)
    assert "16 samples a step of 128, 2 epochs" in said
    assert "learning rates of its steps: equal" in said
    assert "keyed by sample, in both columns" in said
    assert not (tmp_path / "weights.pt").exists(), "a trial's weights must not take the place of the user's"


@pytest.mark.slow
def test_what_the_recorder_does_not_know_makes_the_losses_part(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(scripts.BY_HAND)
    ended = run_lockstep("reproduce", "--steps", "3", "--compare", "1", "script.py", cwd=tmp_path, timeout=300)
    assert ended.code == 1, ended.text
    assert "losses: they part at step 2" in ended.out
    line = scripts.BY_HAND.splitlines().index("            optimizer.step()") + 1
    assert f"its gradients are changed between backward and the step of script.py:{line}" in ended.out


def test_what_a_class_needs_of_a_script() -> None:
    found, missing = excerpt(SCRIPT, {"Net"}, {"SIZE": 3, "LATER": object()})
    assert missing == ["LATER"]
    assert "import math" in found
    assert "os" not in found
    assert "from a import b as c\n" in found
    assert "SIZE = 3" in found
    assert "@c\nclass Net:" in found
    assert "Other" not in found
    assert "parse" not in found


def test_transforms_that_flags_say() -> None:
    tensor = {"name": "ToTensor", "values": {}}
    normal = {"name": "Normalize", "values": {"mean": [0.5], "std": [0.25], "inplace": False}}
    flip = {"name": "RandomHorizontalFlip", "values": {"p": 0.5}}
    crop = {"name": "RandomCrop", "values": {"size": [32, 32], "padding": 4, "fill": 0, "padding_mode": "reflect"}}
    said = {"mean": (0.5,), "std": (0.25,), "flip": True, "crop_padding": 4, "crop_fill": "reflect"}
    assert _pixels([crop, flip, tensor, normal], [tensor, normal]) == said
    assert _pixels([tensor], [tensor]) == {"mean": (0.0,), "std": (1.0,)}
    assert _pixels([flip, crop, tensor, normal], [tensor, normal]) is None
    assert _pixels([tensor, normal], [tensor]) is None
    assert _pixels(None, [tensor]) is None
