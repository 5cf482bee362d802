"""`lockstep reproduce`: a script's experiment as a recipe, and the proof that it is that one."""

import copy
import json
import math
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.commands.audit.events import line_in
from lockstep.commands.reproduce.experiment import _more_than_the_loss
from lockstep.commands.reproduce.loaders import Loaders
from lockstep.commands.reproduce.recipe import _pixels
from lockstep.commands.reproduce.recorder import Recorder
from lockstep.commands.reproduce.report import _faults
from lockstep.commands.reproduce.source import excerpt
from lockstep.commands.reproduce.start import Reproduce
from lockstep.commands.reproduce.watching import watch_calls
from lockstep.commands.shared.arguments import HelpAsked, parse, planned
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
    config = planned("train", lambda config: config, ["--config", str(tmp_path / "out" / "recipe.toml")])
    optim = config.optim
    assert (config.epochs, config.batch_size, config.seed) == (6, 16, 3)
    assert (optim.optimizer, optim.lr, optim.momentum, optim.weight_decay) == ("sgd", 0.1, 0.9, 1e-4)
    assert (optim.schedule, optim.step_epochs, optim.gamma) == ("step", 2.0, 0.5)
    parts = (tmp_path / "out" / "parts.py").read_text()
    assert "WIDTH = 4" in parts
    assert "DataLoader(" not in parts


def test_flags_stand_before_the_script() -> None:
    names, chosen = parse(Reproduce(), ["--steps", "3", "train.py", "--steps", "5"], script=True)
    assert (names, chosen.steps) == (["train.py", "--steps", "5"], 3)
    assert parse(Reproduce(), ["train.py", "--help"], script=True) == (["train.py", "--help"], Reproduce())
    with pytest.raises(HelpAsked):
        parse(Reproduce(), ["--help"], script=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print('last words')\n", "took no step that could be recorded: it ended by itself"),
        ("print('last words'\n", "took no step that could be recorded: SyntaxError: '(' was never closed"),
        ("import os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)\n", "a process was killed by signal 9"),
    ],
)
def test_a_script_that_trains_nothing_is_reported_with_what_ended_it(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "script.py").write_text(text)
    ended = run_lockstep("reproduce", "script.py", cwd=tmp_path, timeout=300)
    assert ended.code == 2, ended.text
    assert why in ended.err, ended.text
    assert "last words" in ended.err
    assert not (tmp_path / "script-lockstep").exists()


@pytest.mark.slow
def test_data_that_are_not_there_have_stand_ins(tmp_path: Path) -> None:
    """The recipe reads what the script reads, from where it does; and evaluating says nothing that is not so."""
    data = 'MNIST("absent", train=True, download=True, transform=transforms.ToTensor())'
    text = scripts.PLAIN.replace("TensorDataset(images, labels)", data).replace("16, shuffle=True", "512, shuffle=True")
    text = "from torchvision import transforms\nfrom torchvision.datasets import MNIST\n" + text
    text = text.replace("WIDTH * 36", "WIDTH * 676").replace("torch.randn(96, 1, 8, 8)", "torch.randn(96, 1, 28, 28)")
    said, losses = reproduced(tmp_path, text, "--steps", "3", "--compare", "1")
    agree(losses, 3)
    assert "stand-in for MNIST, training (a download): the losses above are of invented pictures" in said
    assert "the evaluated model" not in said
    parts = (tmp_path / "out" / "parts.py").read_text()
    assert f"MNIST({str(tmp_path / 'absent')!r}, train=True, download=True" in parts


def test_the_model_that_is_evaluated_is_the_trained_one() -> None:
    """Its layers are called as well, and are no other models."""
    recorder = Recorder(1, Loaders(1, math.inf))
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    recorder.model, original = model, nn.Module.__call__
    watch_calls(recorder)
    try:
        with torch.no_grad():
            model.eval()(torch.ones(1, 2))
            assert recorder.evaluated == {"model"}
            copy.deepcopy(model)(torch.ones(1, 2))
            assert recorder.evaluated == {"model", "copy"}
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


@pytest.mark.slow
def test_ranks_with_faults_that_are_replayed_and_not_copied(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, scripts.RANKS, "--nproc", "2", "--steps", "4")
    agree(losses, 4)
    assert set(losses) == {"script", "1", "2"}
    for part in (
        "40 samples a step of 240, 4 epochs",
        "LS101: set_epoch is never called (epoch 2 had epoch 1's order)",
        "LS104: a rank's part of the test set is taken for the whole (a rank evaluated 45 of 90 samples)",
        "(gradients are 2 times those of the mean)",
        "--batch-norm groups:10",
        "learning rates of all epochs: equal",
    ):
        assert part in said, said
    config = planned("train", lambda config: config, ["--config", str(tmp_path / "out" / "recipe.toml")])
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


def test_a_penalty_is_seen_in_what_backward_starts_from() -> None:
    def steps(*pairs: tuple[float, float]) -> list[dict[str, object]]:
        return [{"passes": [{"loss": loss, "backward": value, "at": "train.py:9"}]} for loss, value in pairs]

    assert _more_than_the_loss(steps((2.0, 2.0), (1.0, 1.0))) == []
    assert _more_than_the_loss(steps((2.0, 1.0), (1.0, 0.5))) == [], "divided by the passes"
    assert _more_than_the_loss(steps((2.0, math.nan), (1.0, math.nan))) == []
    assert "(train.py:9)" in _more_than_the_loss(steps((2.0, 2.5), (1.0, 1.5)))[0]


def test_lines_of_the_users_own_code(tmp_path: Path) -> None:
    here = line_in(str(Path(__file__).parent))
    assert here.startswith("test_reproduce.py:")
    assert line_in(str(tmp_path)) == ""


def test_faults_are_named_where_they_are_so() -> None:
    """A part of the test set is no whole only where the ranks reduce nothing; an order in sequence needs no epoch."""

    def faults(shuffles: bool, reduces: bool) -> list[str]:
        train = {"sampler": "DistributedSampler", "shuffles": shuffles, "firsts": [[1, 2], [1, 2]]}
        tested = {"sampler": "DistributedSampler", "length": 90}
        record = {"clip_scale": 1, "reduces": reduces}
        experiment = SimpleNamespace(train=train, evaluated=tested, record=record, world=2, sampled=[45], loss_factor=1)
        return [line.partition(":")[0] for line in _faults(experiment)]  # type: ignore[arg-type]

    assert faults(shuffles=True, reduces=False) == ["LS101", "LS104"]
    assert faults(shuffles=False, reduces=True) == ["order"]
