"""`lockstep preview`: its picture is what the training loader hands out, to the pixel."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.commands.preview import Views, drawn, views
from lockstep.config import Config, DataConfig, Execution, ModelConfig, SamplesConfig
from lockstep.distributed.world import World
from lockstep.training.assemble import load_data, train_loader
from tests.inprocess import said

DIGITS = Config(
    batch_size=4,
    data=DataConfig(
        dataset="digits", fraction=0.02, augment=("randaugment:2,9", "tests.data.test_transforms:own"), crop_padding=1
    ),
    execution=Execution(device="cpu"),
)


def test_it_shows_what_the_training_loader_hands_out() -> None:
    shown, world = views(DIGITS, 6, 3), World.single()
    images, _ = load_data(DIGITS, world)
    loader = train_loader(DIGITS, images, world)
    first = np.concatenate([loader.order.step(0, 0), loader.order.step(0, 1)])[:6].tolist()
    assert [title.split()[1] for title in shown.titles] == [f"({sample})" for sample in first]
    stored, labels = images.read(np.array(first), None)
    assert torch.equal(shown.before, stored)
    assert [title.split()[0] for title in shown.titles] == [images.classes[label] for label in labels]
    (mean,), (std,) = images.mean, images.std
    for epoch in range(3):
        found: dict[int, torch.Tensor] = {}
        for batch in loader.epoch(epoch):
            pixels = ((batch.images * std + mean) * 255).round().to(torch.uint8)
            found |= dict(zip(batch.ids.tolist(), pixels, strict=True))
        for row, sample in enumerate(first):
            assert torch.equal(shown.after[epoch, row], found[sample])
    assert not torch.equal(shown.after[0], shown.after[1])


def test_the_sheet_has_every_picture_in_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    said(capsys, "preview", "--augment", "randominvert:1", "--samples", "3", "--views", "2", "--out", out)
    sheet = np.array(Image.open(out))
    config = replace(Config(), data=replace(Config().data, augment=("randominvert:1",)))
    shown = views(config, 3, 2)
    assert torch.equal(shown.after[0], 255 - shown.before)
    for pictures, times in ((shown.before, 1), (shown.after[0], 2)):  # inverted in both epochs
        for picture in pictures:
            cell = np.repeat(np.repeat(picture[0].numpy(), 12, 0), 12, 1)[:, :, None].repeat(3, 2)
            windows = np.lib.stride_tricks.sliding_window_view(sheet, (96, 96, 3))[..., 0, :, :, :]
            corners = np.argwhere(
                (windows[..., 0, 0, 0] == cell[0, 0, 0]) & (windows[..., 95, 95, 0] == cell[95, 95, 0])
            )
            assert sum(np.array_equal(windows[y, x], cell) for y, x in corners) == times


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 300, 500), (4, 33, 47), (2, 9, 9)])
def test_sheets_of_any_shape_with_long_names(shape: tuple[int, int, int]) -> None:
    pictures = torch.zeros(3, *shape, dtype=torch.uint8)
    sheet, _ = drawn(Views(("n" * 200, "花", ""), pictures, pictures[None]))
    assert min(sheet.size) > 100


def test_a_run_folder_and_the_code_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(DIGITS.to_dict()))
    command = ("preview", "run", "--views", "1")
    _, err = said(capsys, *command, code=2)
    assert "names code that this would run: augment tests.data.test_transforms:own" in err
    assert "--trust-code" in err
    out, _ = said(capsys, *command, "--trust-code")
    assert out.startswith("preview.png: 6 pictures of 8x8, as they are and in 1 epoch(s)\n")
    assert "--crop-padding 1 --augment randaugment:2,9 tests.data.test_transforms:own" in out
    before = Path("preview.png").read_bytes()
    out, _ = said(capsys, *command, "--augment=", "--crop-padding", "0", "--trust-code")
    assert Path("preview.png").read_bytes() != before
    assert "nothing is changed" in out


def test_a_file_gives_what_the_flags_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "mine.toml", tmp_path / "x.png"
    file.write_text('[data]\ndataset = "digits"\naugment = ["randaugment:2,9", "gaussianblur:3,p=0.5"]\n')
    command = ("preview", "digits", "--views", "1", "--out", out)
    assert "--augment randaugment:2,9 gaussianblur:3,p=0.5" in said(capsys, *command, "--config", file)[0]
    before = out.read_bytes()
    said(capsys, *command, "--augment", "randaugment:2,9", "gaussianblur:3,p=0.5")
    assert out.read_bytes() == before


def test_another_size_in_training_and_samples_that_come_again() -> None:
    data = replace(DIGITS.data, image_size=8, train_size=12)
    shown = views(replace(DIGITS, batch_size=6, data=data, samples=SamplesConfig(aug_repeats=3)), 6, 2)
    assert (shown.before.shape, shown.after.shape) == ((6, 1, 12, 12), (2, 6, 1, 12, 12))
    rows = [row for row, title in enumerate(shown.titles) if title == shown.titles[0]]
    assert len(rows) > 1
    assert all(torch.equal(shown.before[row], shown.before[rows[0]]) for row in rows)
    assert not any(torch.equal(shown.after[0, row], shown.after[0, rows[0]]) for row in rows[1:])


def test_pictures_that_are_normalised_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(data=DataConfig(dataset="tests.commands.test_preview:floats"), model=ModelConfig(model="mlp"))
    shown = views(config, 2, 1)
    assert (int(shown.before.min()), int(shown.before.max())) == (0, 255)


def floats() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    images = torch.linspace(-3, 2, 2 * 64).view(2, 1, 8, 8)
    return (images, torch.arange(2)), (images, torch.arange(2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x.jpg"], "--out x.jpg is no .png"),
        (["--samples", "0"], "--samples 0 is too small"),
        (["--views", "101"], "--views 101 is too large"),
        (["--augment", "randaugmnt"], "Did you mean randaugment"),
        (["digits", "mnist"], "preview takes one recipe"),
        (["no-such-recipe"], "unknown recipe 'no-such-recipe'"),
        (["--out", "missing/x.png"], "can't write missing"),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in said(capsys, "preview", *words, code=2)[1]
