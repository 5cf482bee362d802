"""What pages show of output and files, compared with what is printed and written (those of no test of their own)."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import resnet18

from lockstep.config import DataConfig, ModelConfig, OptimConfig, SamplesConfig
from lockstep.config.recipes import recipe
from lockstep.data.image_sets import ArraySet, table_on
from lockstep.data.loaders import resident
from lockstep.data.order import micro_batches
from lockstep.data.picture_set import PictureSet
from lockstep.data.sources import load
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.monitoring import desync
from lockstep.training import optimizers
from lockstep.training.assemble import loaders, train_loader
from lockstep.training.freezing import freeze
from lockstep.training.losses import loss_of
from tests.docs.test_blocks import BLOCK
from tests.subprocesses import run_lockstep
from tests.training.checked_models import Spread, found

DOCS = Path(__file__).parents[2] / "docs"
ALONE = World.single()


def block(page: str, begins: str) -> list[str]:
    """The lines of the one block of a page that begins so."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (found,) = [body.splitlines() for _, body in BLOCK.findall(text) if body.startswith(begins)]
    return found


def rare() -> ArraySet:
    """500 cats, 100 dogs and 10 frogs, as the page has them."""
    labels = np.repeat(np.arange(3), (500, 100, 10))
    pixels = np.zeros((len(labels), 1, 2, 2), np.uint8)
    return ArraySet("rare", ("cat", "dog", "frog"), (0.5,), (0.5,), (pixels,), labels, "rare")


def test_one_step_is_made_of_what_the_design_lists() -> None:
    shown = [line.split()[0].partition("(")[0] for line in block("design.md", "order.step(epoch, t)")]
    assert shown == ["order.step", "micro_batches", "read", "augment", "step"]
    train, _ = loaders("digits", ALONE, batch_size=8)
    ids = train.order.step(0, 0)
    assert ids.dtype == np.int64
    assert ids.shape == (8,)
    assert len(micro_batches(len(ids), 2, ALONE)) == 2
    assert isinstance(train.images, ArraySet)
    pixels, labels, numbers = next(resident(train.images, ALONE.device)(iter([(ids, 0)])))
    assert (pixels.dtype, pixels.shape, labels.shape) == (torch.uint8, (8, 1, 8, 8), (8,))
    images = train.augment(pixels, numbers, 0)
    assert (images.dtype, images.shape) == (torch.float32, (8, 1, 8, 8))


def test_what_is_frozen_is_said_as_the_page_has_it() -> None:
    assert freeze(resnet18(num_classes=100), ModelConfig(freeze_until="fc")) == block("photos.md", "frozen: ")


def test_smaller_rates_below_are_said_as_the_page_has_it() -> None:
    optim = OptimConfig(optimizer="adamw", lr=5e-4, weight_decay=0.05, layer_decay=0.75, head_lr=2e-3)
    assert optimizers.lines(resnet18(num_classes=100), optim, 5e-4) == block("photos.md", "layer decay ")


def test_rare_classes_are_said_as_the_page_has_it() -> None:
    config = recipe("digits")
    balanced = train_loader(replace(config, samples=SamplesConfig(balance="equal")), rare(), ALONE)
    assert balanced.notes == block("photos.md", "an epoch is 609 images")
    _, notes = loss_of(OptimConfig(class_weights="auto"), train_loader(config, rare(), ALONE))
    assert notes == block("photos.md", "class weights: ")


def test_a_model_that_looks_at_its_whole_batch_is_named_as_the_page_has_it() -> None:
    ((*_, message),) = [each for each in found(ALONE, Spread) if each[0] == "gradient"]
    assert " ".join(block("guide.md", "note: weights will differ")).startswith(f"note: {message}. ")


@pytest.mark.parametrize("name", ["flowers", "clothes"])
def test_the_tables_are_read_as_the_page_has_them(name: str, tmp_path: Path) -> None:
    first = "rose" if name == "flowers" else "shirt"
    lines = block("photos.md", f"path,label,split\nimages/0001.jpg,{first}")
    (tmp_path / "images").mkdir()
    lines.append("images/0004.jpg,tulip,train" if name == "flowers" else "images/0004.jpg,red,val")
    for line in lines[1:]:
        Image.new("RGB", (9, 8), len(line)).save(tmp_path / line.split(",")[0])
    (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    options = ":separator=;" if name == "clothes" else ""
    train, val = load(DataConfig(dataset=f"table:{tmp_path / name}.csv{options}", image_size=8), tmp_path, 0, ALONE)
    assert len(val) == 1
    assert isinstance(train, PictureSet)
    if name == "flowers":
        assert (train.classes, len(train)) == (("rose", "tulip"), 2)
        return
    assert (sorted(train.classes), len(train)) == (["blue", "red", "shirt", "trousers"], 3)
    table = table_on(train, torch.device("cpu"))
    assert table is not None
    rows = table[train.read(np.arange(3), None)[1]]
    keys = [Path(train.source.key(i)).name for i in range(3)]
    worn = {key: {train.classes[k] for k in rows[i].nonzero().flatten().tolist()} for i, key in enumerate(keys)}
    parts = [line.split(",") for line in lines[1:4]]
    shown = {Path(path).name: set(filter(None, labels.split(";"))) for path, labels, _ in parts}
    assert worn == shown


class OddRank:
    """A world of three as rank 0 sees it, in which rank 1's value number `odd` has another digest."""

    size, rank, device = 3, 0, torch.device("cpu")

    def __init__(self, odd: int) -> None:
        self.odd = odd

    def rows(self, mine: Tensor) -> Tensor:
        table = mine.expand(3, -1).clone()
        if len(mine) > 1:
            table[1, self.odd] += 1
        return table

    def gather(self, _: object) -> list[str]:
        return ["vm"] * 3


def test_ranks_that_differ_are_named_as_the_page_has_it() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    odd = [name for name, _ in desync.contents(net, optimizer)].index("momentum_buffer of 3.weight")
    world: Any = OddRank(odd)
    with pytest.raises(UserError) as raised:
        desync.check(world, 40, net, optimizer)
    first, *remedy = block("faults.md", "lockstep: the ranks differ at step 40")
    number = re.compile(r"of \d+ values")
    assert number.sub("#", f"lockstep: {raised.value.message}") == number.sub("#", first)
    assert " ".join(line.strip() for line in remedy) == raised.value.remedy


@pytest.mark.slow
def test_a_checkpoint_has_the_files_that_the_page_lists(tmp_path: Path) -> None:
    ended = run_lockstep(
        "train", "digits", "--epochs", "1", "--ema", "0.9", "--nproc", "1", "--out", "run", cwd=tmp_path
    )
    assert ended.code == 0, ended.text
    run = tmp_path / "run"
    (checkpoint,) = (run / "checkpoints").iterdir()
    folder, *files = block("checkpoints.md", "checkpoints/step-")
    assert re.sub(r"\d+", "#", f"checkpoints/{checkpoint.name}/") == re.sub(r"\d+", "#", folder)
    assert len(checkpoint.name) == len("step-000000460")
    assert {line.split()[0] for line in files} == {path.name for path in checkpoint.iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the page's machine has no GPU")
def test_the_doctor_checks_what_the_page_shows(tmp_path: Path) -> None:
    ended = run_lockstep("doctor", cwd=tmp_path, timeout=240)
    shown, said = (
        [line[8:27].strip() for line in lines if line[:8].strip() in ("ok", "warn", "fail", "skipped")]
        for lines in (block("doctor.md", "ok      torch "), ended.out.splitlines())
    )
    assert said == shown, ended.text


@pytest.mark.slow
def test_a_sweep_prints_the_table_of_the_page(tmp_path: Path) -> None:
    command, *shown = block("guide.md", "$ lockstep sweep digits")
    ended = run_lockstep(*command.split()[2:], cwd=tmp_path, timeout=900)
    assert ended.code == 0, ended.text
    table = {line.split()[0]: line.split() for line in ended.out.splitlines() if line.strip()}  # by the first word
    for row in (line.split() for line in shown[1:]):
        assert table[row[0]][1] == row[1]
        assert abs(float(table[row[0]][2]) - float(row[2])) < 3
