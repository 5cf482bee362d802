"""Configs: what they refuse, with the remedy, and JSON there and back."""

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig, SamplesConfig
from lockstep.config.fields import flags_of
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_json_and_know_their_name(name: str) -> None:
    config = recipe(name)
    assert config.recipe == name
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in values.items():
        found += leaves(value, (*path, name)) if isinstance(value, dict) else [(*path, name)]
    return found


LEAVES = leaves(Config().to_dict())


@given(st.sampled_from(LEAVES), st.sampled_from([None, {}, {"a": 1}, [None], "not this", 1.5, True, [["a"]]]))
def test_a_value_of_another_type_is_named(leaf: tuple[str, ...], value: Any) -> None:
    values = Config().to_dict()
    inner = values
    for name in leaf[:-1]:
        inner = inner[name]
    if isinstance(value, type(inner[leaf[-1]])) or (isinstance(inner[leaf[-1]], float) and value == 1.5):
        return
    if leaf[-1] == "augment" and isinstance(value, str):  # a file may have them in one text, as the command line has
        return
    if leaf[-1] == "nproc" and value == 1.5:
        value = "all"
    inner[leaf[-1]] = value
    with pytest.raises(UserError) as caught:
        Config.from_dict(values)
    assert re.search(rf"config: .*{leaf[-1].replace('_', '[-_]')}", caught.value.message)
    assert caught.value.remedy


def test_unknown_entries_are_named_and_missing_ones_keep_their_default() -> None:
    values = Config(epochs=3).to_dict()
    del values["seed"], values["optim"]["ema"]
    assert Config.from_dict(values) == Config(epochs=3)
    values["optim"]["lamb"] = 1
    with pytest.raises(UserError, match=r"unknown entry of \[optim\] in config: 'lamb'"):
        Config.from_dict(values)
    wrong: Any
    for wrong in ([], 3, "x", None):
        with pytest.raises(UserError, match="not a group of entries"):
            Config.from_dict(wrong)
    with pytest.raises(UserError, match="--epochs 0 is too small"):
        Config.from_dict({"epochs": 0})


WRONG: list[tuple[type, dict[str, Any], str]] = [
    (DataConfig, {"fraction": 0.0}, "--fraction 0.0"),
    (DataConfig, {"fraction": 1.5}, "--fraction 1.5"),
    (DataConfig, {"fraction": math.nan}, "--fraction nan"),
    (DataConfig, {"val_fraction": 1.0}, "--val-fraction 1.0"),
    (DataConfig, {"crop_padding": -1}, "--crop-padding -1"),
    (DataConfig, {"image_size": -1}, "--image-size -1"),
    (SamplesConfig, {"aug_repeats": 0}, "--aug-repeats 0"),
    (SamplesConfig, {"mixup": -1.0}, "--mixup -1.0"),
    (SamplesConfig, {"cutmix": math.nan}, "--cutmix nan"),
    (OptimConfig, {"lr": 0.0}, "--lr 0.0"),
    (OptimConfig, {"lr": math.nan}, "--lr nan"),
    (OptimConfig, {"lr": math.inf}, "--lr inf"),
    (OptimConfig, {"milestones": (1.0, math.inf)}, "--milestones inf is not a finite number"),
    (OptimConfig, {"loss": "focal:"}, "--loss focal: is not one of cross-entropy, bce, focal:GAMMA"),
    (OptimConfig, {"loss": "bce:2"}, "--loss bce:2 is not one of cross-entropy"),
    (OptimConfig, {"class_weights": "1,0"}, "--class-weights 1,0 are none"),
    (OptimConfig, {"class_weights": "effective:1"}, "--class-weights effective:1 are none"),
    (OptimConfig, {"class_weights": "1,nan"}, "--class-weights 1,nan are none"),
    (OptimConfig, {"momentum": 1.0}, "--momentum 1.0"),
    (OptimConfig, {"weight_decay": -0.1}, "--weight-decay -0.1"),
    (OptimConfig, {"warmup_epochs": -1.0}, "--warmup-epochs -1.0"),
    (OptimConfig, {"step_epochs": 0.0}, "--step-epochs 0.0"),
    (OptimConfig, {"gamma": 0.0}, "--gamma 0.0"),
    (OptimConfig, {"base_batch_size": -1}, "--base-batch-size -1"),
    (OptimConfig, {"schedule": "multistep"}, "--schedule multistep with no --milestones"),
    (OptimConfig, {"label_smoothing": 1.0}, "--label-smoothing 1.0"),
    (OptimConfig, {"ema": 1.0}, "--ema 1.0"),
    (OptimConfig, {"ema_warmup": True}, "--ema-warmup with --ema 0"),
    (OptimConfig, {"clip_norm": -1.0}, "--clip-norm -1.0"),
    (OptimConfig, {"nesterov": True, "momentum": 0.0}, "--nesterov with --momentum 0"),
    (OptimConfig, {"nesterov": True, "optimizer": "adam"}, "--nesterov with --optimizer adam"),
    (Execution, {"log": ("csv", "tensorbord")}, "unknown log 'tensorbord'"),
    (Execution, {"nproc": 0}, "--nproc 0"),
    (Execution, {"nproc": 1025}, "--nproc 1025 is too large"),
    *((Execution, {"nproc": text}, f"--nproc {text} is not a whole number or auto") for text in ("1:4", "4")),
    (Execution, {"nnodes": 0}, "--nnodes 0"),
    (Execution, {"log_every": 0}, "--log-every 0"),
    (Execution, {"eval_batch_size": 0}, "--eval-batch-size 0"),
    (Execution, {"workers": -1}, "--workers -1"),
    (Execution, {"threads": -1}, "--threads -1"),
    (Execution, {"collective_timeout": 0.0}, "--collective-timeout 0.0"),
    (Execution, {"collective_timeout": math.inf}, "--collective-timeout inf"),
    (Execution, {"master_port": 65536}, "--master-port 65536"),
    (Execution, {"node_rank": 1}, "--node-rank 1 with --nnodes 1"),
    (Execution, {"nnodes": 2}, "one address to meet at"),
    (Config, {"epochs": 0}, "--epochs 0"),
    (Config, {"batch_size": 0}, "--batch-size 0"),
    (
        Config,
        {"batch_size": 64, "samples": SamplesConfig(aug_repeats=3)},
        "--aug-repeats 3 of each image don't fill a batch of 64",
    ),
    (
        Config,
        {"samples": SamplesConfig("sqrt"), "optim": OptimConfig(class_weights="effective:0.9")},
        "--balance sqrt with --class-weights effective:0.9: rare classes would count twice",
    ),
    (Config, {"batch_size": 1, "samples": SamplesConfig(cutmix=1.0)}, "--batch-size 1 with --cutmix 1"),
    (Config, {"accumulate": -1}, "--accumulate -1"),
    (Config, {"batch_size": 4, "accumulate": 5}, "--accumulate 5"),
    (Config, {"batch_size": 3, "execution": Execution(nproc=4)}, "a batch of 3 is smaller than the 4 processes"),
    (
        Config,
        {"batch_size": 6, "accumulate": 2, "execution": Execution(nproc=4)},
        "a batch of 6 in 2 micro-batches is smaller than the 4 processes",
    ),
]


@pytest.mark.parametrize(("cls", "values", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_every_refusal_names_the_thing_and_the_remedy(cls: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        cls(**values)
    assert message in caught.value.message
    assert caught.value.remedy


def test_the_smallest_batch_that_the_message_names_is_enough() -> None:
    for accumulate, nproc in [(1, 4), (2, 4), (3, 2), (5, 7)]:
        with pytest.raises(UserError) as caught:
            Config(batch_size=accumulate * nproc - 1, accumulate=accumulate, execution=Execution(nproc=nproc))
        least = int(re.findall(r"at least (\d+)", caught.value.remedy)[0])
        assert least == accumulate * nproc
        Config(batch_size=least, accumulate=accumulate, execution=Execution(nproc=nproc))


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_the_rate_grows_with_the_batch_as_asked(rule: Any, lr: float) -> None:
    optim = OptimConfig(lr=0.1, scale_lr=rule, base_batch_size=32)
    assert Config(batch_size=128, optim=optim).lr == pytest.approx(lr, rel=1e-12)


def test_a_rate_is_not_scaled_by_a_batch_size_that_nobody_gave() -> None:
    with pytest.raises(UserError, match="--scale-lr linear with --base-batch-size 0"):
        Config(optim=OptimConfig(lr=0.1, scale_lr="linear"))
    for made in RECIPES.values():
        config = made()
        if config.optim.base_batch_size:
            assert config.optim.base_batch_size == config.batch_size, config.recipe
    assert dataclasses.replace(
        RECIPES["cifar10-speed"](),
        batch_size=1000,
        optim=dataclasses.replace(RECIPES["cifar10-speed"]().optim, scale_lr="linear"),
    ).lr == pytest.approx(0.12)


def test_help_lists_our_models_and_data_sets() -> None:
    from lockstep import models
    from lockstep.data.sources import DATASETS

    flags = flags_of(Config)
    ours = re.findall("Ours: (.*?);", flags["model"].help)[0]
    assert sorted(ours.split(", ")) == models.names()
    listed = re.findall(r"your own\. (.*), or package", flags["dataset"].help)[0]
    assert sorted(listed.rstrip(",").split(", ")) == sorted(DATASETS)
    assert ModelConfig().model in models.names()


def test_a_trial_of_one_share_has_a_batch_of_any_size() -> None:
    samples = SamplesConfig("equal", 4, mixup=0.2, cutmix=1.0)
    for size in (1, 2, 13):
        trial = Config(batch_size=size, samples=samples.for_batch(size))
        assert trial.samples.mixes == (size > 1)
        assert trial.samples.balance == "equal"
