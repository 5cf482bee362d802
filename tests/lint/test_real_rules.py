"""More of what real code does, each a right way that was once reported beside the wrong one that still is."""

from pathlib import Path

import pytest

from lockstep.commands.lint.check import check
from lockstep.commands.lint.rule import RULES
from tests.lint.field import LOOP
from tests.lint.shapes import BEFORE

DRAWN = """\
import lightning as L
class Noise(Dataset):
    def __init__(self, n):
        self.data = MADE
    def __getitem__(self, i):
        return self.data[i]
    def __len__(self):
        return len(self.data)
class Lit(L.LightningModule):
    def training_step(self, batch, i):
        return self.layer(batch).sum()
    def train_dataloader(self):
        return DataLoader(Noise(64))
    def val_dataloader(self):
        return DataLoader(Noise(64))
L.Trainer(max_epochs=1).fit(Lit())
"""
RATED = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, HELP)
def main(args):
    dist.init_process_group("gloo")
    hyp = {"rate": 0.1, "per_device_images": 8}
    RATE
    model = DDP(Net()); opt = torch.optim.SGD(model.parameters(), lr=hyp["rate"])
    data = make(64); sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        fit(loader, model, opt)
    dist.destroy_process_group()
if __name__ == "__main__":
    main(parser.parse_args())
"""
JUDGE = """\
import argparse
from train import main
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=1, help="batch size")
print(main, parser.parse_args())
"""


def rated(rate: str = "pass", said: str = "type=int") -> str:
    return LOOP + RATED.replace("RATE", rate).replace("HELP", said).replace(
        "type=int, default=8, type=int", "default=8"
    )


CASES = [
    ("", "train", {"train": DRAWN.replace("MADE", "torch.randn(n, 32)")}),
    ("LS106", "train", {"train": DRAWN.replace("MADE", "torch.load('cifar.pt')[:n]")}),
    ("LS208", "train", {"train": rated()}),
    (
        "",
        "train",
        {"train": rated('hyp["rate"] *= max(1.0, dist.get_world_size() * 8 / 64)').replace('"rate"', '"lr0"')},
    ),
    (
        "",
        "train",
        {"train": rated('hyp["rate"] *= max(1.0, dist.get_world_size() * 8 / 64)').replace('"rate"', '"lr"')},
    ),
    ("", "judge", {"train": rated(said='help="images per GPU"'), "judge": JUDGE}),
]


@pytest.mark.parametrize(
    ("codes", "first", "files"), CASES, ids=[f"{c or 'right'}-{n}" for n, (c, *_) in enumerate(CASES)]
)
def test_more_of_what_real_code_does(codes: str, first: str, files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text if name == "judge" else BEFORE + text)
    found, broken = check([tmp_path / f"{first}.py"], frozenset(RULES))
    assert not broken
    assert sorted({each.code for each in found} - {"LS203", "LS204"}) == codes.split()
