"""Training on images of one side and evaluating on those of another."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.checkpoint.weights import Card
from lockstep.config import Config, DataConfig, Execution, ModelConfig
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import assemble
from lockstep.training.loop import train
from tests.inference.runs import pictures

SINGLE = World.single()
NET = ModelConfig(model="tests.training.test_freezing:net")  # ends in an average: takes any side


def folder(root: Path, **options: object) -> Config:
    data = DataConfig(dataset="folder", image_size=32, **{"train_size": 24, **options})  # type: ignore[arg-type]
    return Config(batch_size=4, data=data, model=NET, execution=Execution(data_dir=str(root), workers=0))


def sides(config: Config) -> tuple[list[int], list[int]]:
    """The images' shapes in training and in evaluation, without the batch."""
    run = assemble(config, SINGLE)
    batch = next(run.train.epoch(0))
    assert run.step(batch).isfinite()
    (_, images, _), *_ = run.val
    return list(batch.images.shape[1:]), list(images.shape[1:])


@pytest.mark.parametrize("options", [{"resized_crop": True}, {"decode_size": 34}])
def test_a_folder_is_trained_on_one_side_and_evaluated_on_another(tmp_path: Path, options: dict[str, object]) -> None:
    assert sides(folder(pictures(tmp_path), **options)) == ([3, 24, 24], [3, 32, 32])


def test_arrays_are_resized_on_the_way() -> None:
    data = DataConfig(dataset="digits", image_size=10, train_size=9, crop_padding=1)
    assert sides(Config(data=data, model=NET)) == ([1, 9, 9], [1, 10, 10])


def test_what_uses_the_model_takes_the_side_of_evaluation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(replace(folder(pictures(tmp_path / "data")), epochs=1), SINGLE, run)
    card = Card.read(run / "weights" / "best.safetensors")
    assert card is not None
    assert (card.shape, card.side) == ((3, 32, 32), 32)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("vit_b_16", {"image_size": 32, "train_size": 16}, "model vit_b_16 can't take 3x16x16 images"),
        ("resnet18", {"train_size": 16}, "--train-size 16 with --image-size 0"),
        ("resnet18", {"image_size": 32, "train_size": 9000}, "--train-size 9000 is too large"),
    ],
)
def test_what_can_not_be(tmp_path: Path, model: str, data: dict[str, int], message: str) -> None:
    config = replace(folder(pictures(tmp_path)), model=ModelConfig(model=model))
    with pytest.raises(UserError, match=message):
        assemble(replace(config, data=DataConfig(dataset="folder", **data)), SINGLE)  # type: ignore[arg-type]
