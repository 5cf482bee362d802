"""Small data: which samples are kept of a set, what stands in for one that isn't there, and where training is ended."""

import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lockstep.commands.audit.small import kept
from tests.subprocesses import Command

PROGRAM = """
import torch, torchvision
from torch import nn
from lockstep.commands.audit import small, standins
from lockstep.commands.audit.plan import Plan

events = []
def emit(event, **values):
    events.append({"event": event, **values})
small.emit = standins._tell[0] = emit
small.install(Plan("", (), "", "", "", 1, samples=256, epochs=2, steps=3))
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, IterableDataset, Subset
from torch.utils.data import TensorDataset, random_split
from torchvision import datasets

whole = TensorDataset(torch.arange(60_000))
assert len(whole) == 240 and [int(whole[place][0]) for place in (0, 1, -1)] == [0, 250, 59750]
assert len({int(value) for value, in whole}) == 240, "each once, spread over the set"
read = sorted(int(each) for batch, in DataLoader(whole, 100, shuffle=True) for each in batch)
assert read == [int(value) for value, in whole]
assert len(DistributedSampler(whole, 2, 0)) == 120
a, b = random_split(whole, [50_000, 10_000])
assert (len(a), len(b)) == (200, 40) and [len(part) for part in random_split(whole, [0.5, 0.5])] == [120, 120]
assert len(Subset(whole, range(30_000))) == 120 and len(Subset(whole, range(7))) == 7
assert len(ConcatDataset([whole, TensorDataset(torch.arange(100))])) == 340
assert len(TensorDataset(torch.arange(256))) == 256

class Own(Dataset):
    def __init__(self, values):
        self.values = values
    def __len__(self):
        return len(self.values)
    def __getitem__(self, index):
        return self.values[index]

class Doubled(Own):
    def __len__(self):
        return super().__len__()
    def __getitem__(self, index):
        return 2 * super().__getitem__(index)

class Around(Dataset):
    def __init__(self, inner):
        self.inner = inner
    def __len__(self):
        return len(self.inner)
    def __getitem__(self, index):
        return self.inner[index]

own, doubled = Own(range(10_000)), Doubled(range(10_000))
assert len(own) == len(doubled) == len(Around(own)) == 208
assert (own[207], doubled[207], Around(own)[207]) == (9951, 19902, 9951)
told = [(each["kind"], each["full"], each["length"]) for each in events if each["event"] == "small"]
assert {("TensorDataset", 60_000, 240), ("Own", 10_000, 208), ("Doubled", 10_000, 208)} == set(told), told

first, again = (datasets.MNIST("absent", train=True, download=True) for _ in range(2))
picture, label = first[9]
assert picture.size == (28, 28) and picture.mode == "L" and torch.equal(first.data, again.data) and len(first) == 240
assert {int(each) for each in first.targets} == set(range(10)) and first.classes[0] == "0 - zero"
assert not torch.equal(datasets.MNIST("absent", train=False).data[:100], first.data[:100])
picture, label = datasets.CIFAR100("absent", False)[3]
assert picture.size == (32, 32) and picture.mode == "RGB" and 0 <= label < 100
folder = datasets.ImageFolder("/absent/train")
assert folder[0][0].size == (256, 256) and len(folder.classes) == 10 and len(folder) == 128
assert datasets.ImageNet("/absent", "val")[5][0].mode == "RGB" and len(datasets.FakeData(100)) == 100
nets = []
for seed in (1, 2):
    torch.manual_seed(seed)
    nets.append(torchvision.models.resnet18(weights="DEFAULT"))
for one, two in zip(nets[0].state_dict().values(), nets[1].state_dict().values()):
    assert torch.equal(one, two)
assert nets[0].conv1.weight.std() > 0
told = {(each["kind"], each["why"]) for each in events if each["event"] == "stand-in"}
assert told == {
    ("MNIST", "a download"), ("MNIST", "not in absent"), ("CIFAR100", "not in absent"),
    ("ImageFolder", "/absent/train is not there"), ("ImageNet", "/absent/val is not there"),
    ("resnet18-f37072fd.pth", "a download"),
}, told

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(1000.0))

model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
def epoch(loader, train):
    batches = 0
    for batch in loader:
        batches += 1
        model(torch.ones(1, 1)).backward()
        if train:
            optimizer.step()
    return batches
assert epoch(DataLoader(Stream(), 10), train=False) == 3
try:
    for number in range(9):
        assert epoch(DataLoader(whole, 64, num_workers=0), train=True) == 4
        assert epoch(DataLoader(own, 64), train=False) == 4
except SystemExit as end:
    assert not end.code
assert number == 2 and events[-1] == {"event": "cut", "why": "epochs"}
print("done")
"""


def test_sets_stand_ins_and_the_end_of_training(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = Command(sys.executable, str(tmp_path / "program.py"), cwd=tmp_path, warm=True).end(timeout=180)
    assert ended.code == 0, ended.text
    assert ended.out == "done\n"
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@given(st.integers(0, 10**7), st.integers(16, 5000))
def test_a_length_keeps_its_remainders_and_order(length: int, most: int) -> None:
    small = kept(length, most)
    assert 0 <= small <= length
    assert (small - length) % 48 == 0 or length <= most
    assert small <= 8 * most + 96
    if length > most:
        assert kept(length + 48, most) >= small
    assert kept(60_000, most) <= max(most, 72)
