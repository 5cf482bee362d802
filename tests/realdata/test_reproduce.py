"""`lockstep reproduce` of a script that trains on the real MNIST: its losses and images are the recipe's."""

from pathlib import Path

import pytest

from lockstep.commands.shared.arguments import planned
from tests.reproduce import shapes
from tests.reproduce.test_reproduce import agree, reproduced

pytestmark = pytest.mark.realdata


def test_mnist_by_torchvision_is_mnist_by_flags(real_data: Path, tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, shapes.DIGITS, "--steps", "4", args=(str(real_data),))
    agree(losses, 4)
    assert set(losses) == {"script", "1", "2"}
    assert "64 samples a step of 60,000, 3 epochs" in said
    assert "images as the recipe reads them: others" not in said
    apart = said.split("images as the recipe reads them: ")[1].split()[0]
    assert apart == "equal" or float(apart) < 1e-6
    config = planned("train", lambda config: config, ["--config", str(tmp_path / "out" / "recipe.toml")])
    assert (config.data.dataset, config.data.mean, config.data.std) == ("mnist", (0.1307,), (0.3081,))
    assert (config.optim.optimizer, config.optim.lr, config.optim.gamma) == ("adadelta", 0.8, 0.7)
