"""A script on the real MNIST, in the shape that everybody copies: its losses and Lockstep's side by side."""

import json
from pathlib import Path

import pytest

from lockstep.commands.shared.arguments import planned
from tests.subprocesses import run_lockstep

# ROOT: the folder of MNIST's files
SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import MNIST


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 5, stride=2), nn.Conv2d(8, 16, 3, stride=2)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(16 * 25, 10)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(x))))
        return F.log_softmax(self.last(self.drop(x.flatten(1))), dim=1)


def main():
    torch.manual_seed(1)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train = DataLoader(MNIST(ROOT, train=True, transform=transform), batch_size=64, shuffle=True)
    test = DataLoader(MNIST(ROOT, train=False, transform=transform), batch_size=1000)
    model = Digits()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(3):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test)
        print(right / 10_000)


if __name__ == "__main__":
    main()
"""


@pytest.mark.realdata
def test_a_script_on_mnist(tmp_path: Path, real_data: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("ROOT", repr(str(real_data))))
    ended = run_lockstep("reproduce", "--out", "out", "--steps", "6", "script.py", cwd=tmp_path, timeout=300)
    assert ended.code == 0, ended.text
    assert "64 samples a step of 60,000, 3 epochs" in ended.out
    proof = json.loads((tmp_path / "out" / "proof.json").read_text())[0]
    assert set(proof["lockstep"]) == {"1", "2"}
    assert len(set(proof["script"])) == 6, "the losses would agree if nothing moved"
    for losses in proof["lockstep"].values():
        assert losses == pytest.approx(proof["script"], rel=1e-5)
    config = planned("train", lambda config: config, ["--config", str(tmp_path / "out" / "recipe.toml")])
    assert (config.data.dataset, config.optim.optimizer, config.optim.gamma) == ("mnist", "adadelta", 0.7)
