"""A changed flag takes with it what the recipe had set for another one, and says so in a line."""

import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest

from lockstep.commands.shared.arguments import planned
from lockstep.config import Config, OptimConfig, ScheduleName
from lockstep.config.changes import _OWN_MODELS, USUAL, changed, flags_for, follows_epochs
from lockstep.config.fields import differences, flags_of, values_of, with_values
from lockstep.config.optim import OPTIMIZERS
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError
from lockstep.training.run_folder import check

SCHEDULES = get_args(ScheduleName)
EPOCHS = (1, 1000)
MODELS = itertools.cycle(itertools.product(("mlp", "resnet18", "timm/resnet18"), ("", None)))


def made(base: Config, **typed: Any) -> Config:
    config: Config = with_values(base, changed(base, typed)[0])
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_every_optimizer_schedule_model_and_length(name: str) -> None:
    base = recipe(name)
    others = itertools.product((*OPTIMIZERS, "timm:lamb", "my.own:optimizer"), SCHEDULES, EPOCHS)
    for (optimizer, schedule, epochs), (model, init) in zip(others, MODELS):  # noqa: B905 (one has no end)
        typed = {"optimizer": optimizer, "schedule": schedule, "epochs": epochs, "model": model}
        typed |= {} if init is None else {"init": init}
        config = made(base, **typed)
        got = values_of(config)
        assert {field: got[field] for field in typed} == typed
        optim = config.optim
        if schedule == "multistep":
            assert 0 < optim.milestones[0] < optim.milestones[-1] < epochs
        assert optim.warmup_epochs < epochs
        if optimizer in USUAL and optimizer != base.optim.optimizer:
            assert USUAL[optimizer][0] / 10 < optim.lr <= USUAL[optimizer][0]
        if init == "":
            assert (optim.layer_decay, optim.head_lr, config.model.adapt_init) == (1.0, 0.0, False)


@pytest.mark.parametrize("name", RECIPES)
def test_and_what_is_checked_before_a_run_starts_agrees(name: str) -> None:
    for typed in ({"optimizer": "adam"}, {"schedule": "multistep"}, {"schedule": "step", "epochs": 1}, {"init": ""}):
        config = made(recipe(name), **typed)
        check(replace(config, data=replace(config.data, augment=())))  # whose import takes seconds


def test_switches_that_a_recipe_goes_with_take_what_does_not_along() -> None:
    tries: dict[str, list[dict[str, Any]]] = {
        "photos": [
            {"exact": 4}, {"resized_crop": False}, {"decode_size": 0}, {"ema": 0.0}, {"image_size": 384},
            {"image_size": 64}, {"model": "digits_net"}, {"init": ""},
        ],
        "cifar10": [{"momentum": 0.0}, {"exact": 8}, {"strategy": "fsdp"}],
    }  # fmt: skip
    pairs = [(recipe(name), each) for name, several in tries.items() for each in several]
    modern = made(recipe("imagenet"), train_size=176, mixup=0.2, cutmix=1.0, aug_repeats=4)
    pairs += [(modern, each) for each in ({"image_size": 0}, {"image_size": 128}, {"batch_size": 30})]
    pairs += [(modern, {"batch_size": 1}), (modern, {"exact": 4})]
    for base, typed in pairs:
        assert {**values_of(made(base, **typed)), **typed} == values_of(made(base, **typed)), typed
    assert made(recipe("photos"), image_size=384).data.decode_size == round(384 * 256 / 224)
    assert made(recipe("photos"), model="resnet18").model.init == "pretrained"
    assert made(recipe("photos"), init="").epochs == 3 * recipe("photos").epochs
    assert made(recipe("photos"), init="", epochs=7).epochs == 7


def test_a_huge_number_is_refused_as_soon_as_a_small_one() -> None:
    with pytest.raises(UserError, match="don't fill a batch"):  # counted down, it would take for ever
        made(recipe("digits"), aug_repeats=10**30)


def test_typed_values_stay_and_those_that_dont_go_together_are_refused() -> None:
    with pytest.raises(UserError, match="--nesterov with --optimizer adam"):
        changed(recipe("cifar10"), {"optimizer": "adam", "nesterov": True})
    config = made(recipe("cifar10"), optimizer="adam", lr=0.1, weight_decay=0.3)
    assert (config.optim.lr, config.optim.weight_decay) == (0.1, 0.3)
    assert made(recipe("cifar100"), epochs=50, milestones=(10.0,)).optim.milestones == (10.0,)
    assert made(recipe("digits"), **{}) == recipe("digits")
    own = replace(recipe("digits"), optim=OptimConfig(optimizer="sgd", lr=0.5, nesterov=True))
    assert made(own, optimizer="a:b").optim.lr == 0.5


def test_the_command_says_what_gave_way(capsys: pytest.CaptureFixture[str]) -> None:
    config: Config = planned("train", lambda config: config, ["cifar10", "--optimizer", "adam"])
    assert (config.optim.optimizer, config.optim.lr, config.optim.nesterov) == ("adam", 1e-3, False)
    said = "note: --optimizer adam also sets --no-nesterov, --lr 0.001 (was 0.1), --weight-decay 0 (was 0.0005)\n"
    assert capsys.readouterr().out == said
    planned("train", lambda config: config, ["cifar100", "--epochs", "1"])
    assert capsys.readouterr().out == (
        "note: --epochs 1 also sets --warmup-epochs 0.5 (was 1), --milestones 0.3,0.6,0.8 (was 60,120,160)\n"
    )
    planned("train", lambda config: config, ["cifar10", "--epochs", "20"])
    assert capsys.readouterr().out == ""


def test_flags_give_the_config_again_also_where_a_value_is_the_recipe_s() -> None:
    base = recipe("cifar10")
    config = replace(base, optim=replace(base.optim, optimizer="adam", nesterov=False))  # at SGD's rate of 0.1
    flags = {flag[0] for flag in flags_for(config, base)}
    assert {"--optimizer", "--lr", "--weight-decay", "--no-nesterov"} == flags


def test_models_of_which_nobody_published_weights() -> None:
    from lockstep import models

    assert {name for name in models.names() if not name.endswith("_cifar")} == {*_OWN_MODELS}
    assert {flag.field for flag in flags_of(Config).values()} >= {"init", "model", "optimizer"}


def test_where_nothing_is_typed_nothing_gives_way() -> None:
    """A file's values are the base of the flags beside it: its own network keeps the weights that the file names."""
    own = made(recipe("digits"), model="parts:model", init="initial.safetensors", lr=0.1, optimizer="adam")
    assert changed(own, {}) == ({}, [])
    assert made(own, epochs=3).model == own.model


@pytest.mark.parametrize("name", ["digits", "cifar100", "imagenet"])
@pytest.mark.parametrize("epochs", [1, 2, 7, 900])
def test_what_follows_from_epochs_alone_is_known_in_both_directions(name: str, epochs: int) -> None:
    base = recipe(name)
    other = with_values(base, changed(base, {"epochs": epochs})[0])
    for one, two in ((base, other), (other, base)):
        differ = {path for path, *_ in differences(one.to_dict(), two.to_dict())} - {"epochs"}
        assert differ <= set(follows_epochs(one.to_dict(), two))
    typed = with_values(other, {"warmup_epochs": 0.25, "lr": 7.0})
    assert "optim.warmup_epochs" not in follows_epochs(base.to_dict(), typed)
    assert "optim.lr" not in follows_epochs(base.to_dict(), typed)
    assert not follows_epochs(base.to_dict(), with_values(base, {"warmup_epochs": 0.25}))
