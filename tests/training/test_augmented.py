"""Runs with --augment: one digest for any number of processes, loader and worker, for each named transform."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.checkpoint.weights import digest
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import assemble, load_data, train_loader
from lockstep.training.run_folder import check
from tests.data.test_transforms import SPECS
from tests.ranks import run_ranks

CONFIG = Config(
    batch_size=23,
    exact=5,
    seed=3,
    data=DataConfig(dataset="digits", fraction=0.03, crop_padding=1, flip=True),  # 43 samples: a batch of 23, one of 20
    model=ModelConfig(model="mlp"),
    optim=OptimConfig(lr=0.05),
    execution=Execution(eval_batch_size=200),
)
STREAMING = replace(CONFIG.execution, loader="streaming")


def of(*specs: str, execution: Execution = CONFIG.execution) -> Config:
    return replace(CONFIG, data=replace(CONFIG.data, augment=specs), execution=execution)


CONFIGS = {
    **{spec: of(spec) for spec in SPECS},
    "all": of(*SPECS),
    "in this process": of(*SPECS, execution=replace(STREAMING, workers=0)),
    "of a worker": of(*SPECS, execution=replace(STREAMING, workers=1)),
}


def digests(world: World, names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        run = assemble(CONFIGS[name], world)
        for batch in run.train.epoch(1):
            run.step(batch)
        found[name] = digest(run.model)
    return found


@pytest.mark.slow
def test_one_digest_for_each_transform_on_any_number_of_processes() -> None:
    alone = run_ranks(digests, 1, list(CONFIGS), timeout=120)[0]
    assert len(set(alone.values())) == len(SPECS) + 1
    assert alone["in this process"] == alone["of a worker"] == alone["all"]
    names = [name for name in CONFIGS if name not in ("in this process", "of a worker")]
    for found in run_ranks(digests, 3, names, timeout=120):
        assert found == {name: alone[name] for name in names}


def test_crops_of_folders_in_the_asked_range_reach_training_alone(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.linear_gradient("L").resize((40, 30)).save(tmp_path / part / "a" / "0.png")
    whole = DataConfig(dataset="folder", resized_crop=True, crop_scale=(1, 1), crop_ratio=(4 / 3, 4 / 3), image_size=16)
    parts = replace(whole, crop_scale=(0.08, 0.08), crop_ratio=(1, 1))
    for data, widest in ((whole, True), (parts, False)):
        config = replace(CONFIG, data=data, execution=replace(CONFIG.execution, data_dir=str(tmp_path)))
        train, val = load_data(config, World.single())
        picture, _ = train.read(np.zeros(1, np.int64), 0)
        assert (int(picture.min()) < 30 and int(picture.max()) > 225) == widest
        assert (picture != val.read(np.zeros(1, np.int64), 0)[0]).any()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"crop_scale": (0.5,)}, "--crop-scale 0.5 is no range\n  .*0.35,1"),
        ({"crop_scale": (0.5, 1.2)}, "--crop-scale 0.5,1.2 is no range"),
        ({"crop_ratio": (2, 1)}, "--crop-ratio 2,1 is no range\n  .*0.75,1.33"),
        ({"crop_ratio": (1, float("inf"))}, "not a finite number"),
        (
            {"crop_scale": (0.5, 1), "resized_crop": False},
            "--no-resized-crop with --crop-scale 0.5,1: it changes nothing",
        ),
    ],
)
def test_ranges_of_crops(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(dataset="folder", **{"resized_crop": True, **words})


def test_evaluation_sees_the_pictures_as_they_are() -> None:
    plain, augmented = (assemble(config, World.single()) for config in (of(), of("randominvert:1")))
    for (_, one, _), (_, other, _) in zip(plain.val, augmented.val, strict=True):
        assert one.equal(other)
    one, other = (next(iter(run.train.epoch(0))).images for run in (plain, augmented))
    assert not one.equal(other)


def test_a_wrong_list_is_refused_before_any_process_starts_and_what_fails_on_pictures_at_assembly() -> None:
    for specs in (["randaugmnt"], ["randaugment", "gaussianblur:2"]):
        with pytest.raises(UserError, match=r"unknown transform|--augment gaussianblur:2"):
            check(of(*specs))
    config = of("randomcrop:9")  # of pictures of 8x8
    check(config)
    images = assemble(of(), World.single()).train.images
    with pytest.raises(UserError, match=r"--augment randomcrop:9, sample 0"):
        train_loader(config, images, World.single())
